"""Files that leave the process: bundle, trace, report."""
