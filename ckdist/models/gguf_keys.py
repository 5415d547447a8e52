"""The fields of GGUF metadata that a family does not read. llama.cpp ignores them too."""

from collections.abc import Sequence

import numpy as np

from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec

_UNUSED = {
    "read elsewhere": "classifier.output_labels classifier.pooling_type nextn_predict_layers pooling_type",
    "said by tensors or other fields": (
        "attention.key_length_swa attention.layer_norm_rms_epsilon attention.recurrent_layers attention.value_length "
        "attention.value_length_swa dense_2_feat_in dense_2_feat_out dense_3_feat_in dense_3_feat_out "
        "embedding_length_out expert_feed_forward_length expert_used_count full_attention_interval "
        "leading_dense_block_count rope.dimension_count rope.dimension_count_swa rope.scaling.original_context_length "
        "ssm.conv_kernel ssm.group_count ssm.inner_size ssm.state_size ssm.time_step_rank"
    ),
    "of images": "deepstack_mapping n_deepstack_layers ple.image_token_id rope.dimension_sections",
    "of files from before 2024": "rope.scale_linear_trained tensor_data_layout",
}
IMAGES_AND_SOUND = "vision.", "mm.", "audio."  # beginnings of names
UNUSED = frozenset(name for names in _UNUSED.values() for name in names.split())
NEUTRAL = 0, 1, "none"  # factors, counts and limits with these values change nothing
REFUSED_UNLESS = {  # a family that does not read a field supports only these values
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "router_logit_softcapping": (0,),
}


def unknown(fields: Fields, names: Sequence[str], spec: ModelSpec) -> list[str]:
    """Returns those of the unread fields that may change results, each with its value.

    Raises ModelFileError if a family that does not read a field does not support its value.
    """
    found, must = [], {**REFUSED_UNLESS, "attention.causal": (spec.generates,)}
    for name in names:
        value = fields.values[name]
        if name in must:
            if isinstance(value, np.ndarray | list) or value not in must[name]:
                allowed = " or ".join(str(one).lower() for one in must[name])
                raise fields.error(name, value, f"{allowed}: another value is not supported in this architecture")
        elif (
            name not in UNUSED
            and not name.startswith(IMAGES_AND_SOUND)
            and (isinstance(value, np.ndarray | list) or value not in NEUTRAL)
        ):
            shown = value.tolist() if isinstance(value, np.ndarray) else value
            found.append(f"{fields.name(name)} is {shown!r:.60}")
    return found
