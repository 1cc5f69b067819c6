"""One file for each published scheduler, named after it: ``critical_path`` is HEFT, ``wavefront`` is Rammer's, ``trtllm`` TensorRT-LLM's.

IOS is ``search/dp.py``; ``streams.py`` is what the allocators of streams share, and no scheduler.
"""
