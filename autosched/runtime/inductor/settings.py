"""What the code that Inductor writes depends on beside what it is given, as one digest. On any doubt there is none, and nothing is kept."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import msgspec

from autosched.core.from_outside import let_through
from autosched.runtime.compiler_files import let_inductor_write
from autosched.runtime.host_key import numerics_key
from autosched.runtime.inductor.cache_files import cache_files_checked
from autosched.runtime.inductor.hung import asking_compilers
from autosched.runtime.inductor.unfinished import remove_unfinished

_log = logging.getLogger(__name__)
# A linker writes a library of a kernel at once; one that is killed leaves what is soon older than this.
_LINKING_S = 5.0

# Passes of the user's own: what they do to the code is in no configuration.
_OWN_PASSES = (
    "post_grad_custom_post_pass",
    "post_grad_custom_pre_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "pre_grad_custom_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
)


def settings_digest(kind: str) -> str:
    """Digest of the settings of PyTorch, of Inductor's configuration, and on a CPU of the vector instructions its compiler can use.

    Equal in two processes only if both would write the same code for the same graph. Private interfaces, the same in PyTorch 2.11 to
    2.15; empty where one is absent, or where passes of the user's own take part.

    Args:
        kind: ``cpu`` or ``cuda``.

    Raises:
        CompilerHung: if the compiler does not say what it can use.
    """
    let_inductor_write()
    # Before anything is loaded: the beginning of a library, without its end, ends the process that loads it.
    remove_unfinished(idle_s=_LINKING_S)
    try:
        import torch._functorch.config as functorch_config
        import torch._inductor.config as inductor_config

        inductor, functorch = _values(inductor_config), _values(functorch_config)
        if any(getattr(inductor_config, name, None) is not None for name in _OWN_PASSES):
            return ""
        isa = ""
        if kind == "cpu":
            from torch._inductor.cpu_vec_isa import pick_vec_isa

            with asking_compilers(), cache_files_checked():
                isa = f"{pick_vec_isa()} {inductor_config.cpp.cxx}"
    except Exception as error:
        let_through(error)
        _log.info("compiled code is not kept: the settings of Inductor cannot be read (%s)", error)
        return ""
    return hashlib.sha256(msgspec.json.encode((numerics_key(kind), inductor, functorch, isa))).hexdigest()[:24]


def _values(config: Any) -> list[tuple[str, str]]:
    # Where a value has no text of its own (a function), its address is in it: it differs from process to process, which is a miss.
    return sorted((name, repr(value)) for name, value in config.save_config_portable(ignore_private_configs=False).items())
