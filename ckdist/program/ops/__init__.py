"""The ops, one file per op or per group of related ops. A process imports the files of the ops that its programs have.

- `infer` computes dimensions and placement of the results: which are sharded, which are partial. It raises LayoutError
  if the forward lacks a collective.
- `reference` defines the op in numpy on the arrays of one rank. A collective gets the arrays of all ranks.
- `vjp` emits the gradients of an op's operands. Gradients are ops like the others.
- `lower` emits the steps that the executor runs.
"""

import functools
import importlib

from ckdist.program.ops.op import OPS, Op

# File -> the ops that it registers. `tests/unit/test_vjp.py` compares this table with the files.
FILES = {
    "attention_ops": "rope rope_grad attend",
    "collectives": "all_reduce all_gather all_to_all",
    "compressed": "select_entries attend_compressed",
    "cross_attention_ops": "store_cross attend_cross",
    "cut_rows": "column_sums cut_rows",
    "dropout": "dropout",
    "delta_rule": "short_conv l2_norm delta_gates delta_rule gated_norm",
    "elementwise": "scale scale_queries soft_cap activate gated gated_heads add select_rows",
    "elementwise_grad": "gated_grad",
    "embedding": "embed input_rows",
    "experts": "route experts",
    "experts_grad": "route_grad grouped_experts grouped_experts_grad switched switched_grad",
    "gated_convolution": "gated_conv",
    "join": "join",
    "latent": "norm_latent norm_latent_grad attend_latent",
    "latent_keys": "latent_keys latent_keys_grad latent_keys_weight_grad latent_values latent_values_grad",
    "layer_inputs": "layer_inputs scale_by sum_rows",
    "linear": "linear",
    "linear_grad": "linear_grad linear_weight_grad bias_grad embed_grad",
    "linear_heads": "linear_heads",
    "loss": "cross_entropy cross_entropy_grad one",
    "low_rank": "low_rank",
    "mamba_scan": "mamba2 head_squares group_norm scan_inputs selective_scan",
    "output_rows": "output_rows mean_rows",
    "index": "select_positions select_blocks",
    "packed_attention": "attend_packed attend_grad",
    "packed_states": "delta_packed delta_grad convolve convolve_grad",
    "magnitude": "row_norms magnitude",
    "ngrams": "ngram_rows convolve_streams",
    "norm_over_heads": "sum_squares rms_norm_heads",
    "position_embedding": "embed_positions embed_waves",
    "rms_norm": "rms_norm layer_norm",
    "rms_norm_grad": "rms_norm_grad group_norm_grad",
    "stage_transfer": "recv send",
    "streams": "mix_streams add_streams read_streams gate_streams altup_predict altup_correct match_rms mix_blocks",
    "tally": "tally tally_grad balance_loss balance_loss_grad",
}
FILE_OF = {name: file for file, names in FILES.items() for name in names.split()}


@functools.cache
def op_named(name: str) -> Op:
    """The op of this name. Imports its file."""
    importlib.import_module(f"{__name__}.{FILE_OF[name]}")
    return OPS[name]
