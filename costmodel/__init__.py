"""Predicting what operators cost, alone and beside each other."""
