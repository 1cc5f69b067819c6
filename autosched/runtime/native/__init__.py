"""Lanes without the interpreter: a C++ library built on this machine, and what Python says to it."""
