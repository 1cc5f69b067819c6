"""The compiled half of the search, by numba: one file for each search or simulator, of the same name as the plain one in ``search/``.

Signatures are explicit, so that one specialisation exists of each function; fastmath is off, because it assumes that no infinities
occur. How edits reach the code cached on disk: :mod:`autosched.search.compiled.cache`.
"""
