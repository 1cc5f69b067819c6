"""Searching stream assignments and launch orders.

Published schedulers are in ``heuristics/``, one file each, but for IOS (``dp.py``). Simulators: ``fluid.py`` (by measured pairs) and
``leftover.py`` (by thread blocks; ``block_pairs.py`` says what pair runs would find there); ``simulate.py`` is how the rest of the project
calls the first. Searches: ``policies.py``, ``beam.py``, ``anneal.py``, ``optuna_search.py``, ``random_search.py``, ``exact.py``;
``portfolio.py`` is the default of them. On the device: ``loop.py``, ``halving.py``, ``device_study.py``, ``correction.py``, ``climb.py``
(with the moves of ``neighbours.py``). Compiled code is in ``compiled/``, under the names of what it serves.
"""
