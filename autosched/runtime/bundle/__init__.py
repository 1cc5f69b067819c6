"""The ``.autosched`` file, as one that may come from a stranger: format, values, and the checks before anything is believed."""
