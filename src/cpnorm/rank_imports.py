"""What ranks import, imported once in the process that they are forked from, and quietly.

verl and Megatron-Core warn of every package that is not installed; none is needed here. A rank
stays quiet: what goes wrong in it comes back as an exception.
"""

import gc
import logging
import os
import warnings

gc.disable()  # while packages are read in there is nothing to collect, and a good deal to look at
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no threads in a process that forks
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import megatron.core.distributed  # noqa: E402
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import megatron.core.pipeline_parallel  # noqa: E402, F401
import verl.workers.engine.megatron.transformer_impl  # noqa: E402
import verl.workers.utils.losses  # noqa: E402, F401

gc.freeze()  # a collection in a rank does not write to, and so copy, the shared pages
gc.enable()
