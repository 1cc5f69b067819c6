def refine(session, problem, proved, proofs, references, **kw):
    return []
