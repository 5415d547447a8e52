"""The names and defaults of a family's fields in config.json: one ConfigKeys in the file of each family."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckdist.errors import ModelFileError
from ckdist.models.fields import Fields

RENAMED = {"rope_scaling": "rope_parameters", "torch_dtype": "dtype"}  # renamed by transformers 5 in all families

_UNUSED = {  # reason -> fields
    "dropout: ckdist trains without it": (
        "attention_dropout activation_dropout attention_probs_dropout_prob attn_pdrop classif_dropout "
        "classifier_dropout decoder_layerdrop dropout dropout_rate embd_pdrop embedding_dropout encoder_layerdrop "
        "hidden_dropout_prob mlp_dropout resid_pdrop summary_first_dropout"
    ),
    "initial values of weights": "init_std initializer_cutoff_factor initializer_factor initializer_range",
    "losses of training, which ckdist's own settings choose": (
        "aux_loss_alpha output_router_logits router_aux_loss_coef router_jitter_noise seq_aux problem_type "
        "sparse_pred_ignore_index sparse_prediction ignore_index"
    ),
    "read with the tokenizer and by the request": (
        "bos_token_id eos_token_id pad_token_id cls_token_id sep_token_id unk_token_id mask_token_id tokenizer_class "
        "decoder_start_token_id forced_bos_token_id forced_eos_token_id bad_words_ids prefix task_specific_params"
    ),
    "sampling, which a request chooses": (
        "begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
        "exponential_decay_length_penalty length_penalty max_length max_new_tokens min_length no_repeat_ngram_size "
        "num_beam_groups num_beams num_return_sequences remove_invalid_values repetition_penalty suppress_tokens "
        "temperature top_k top_p typical_p"
    ),
    "read when weights are opened": "dtype quantization_config compression_config architectures model_type",
    "layers that predict further tokens are left out": (
        "num_nextn_predict_layers mtp_num_hidden_layers mtp_use_dedicated_embeddings use_mtp num_mtp_modules "
        "mtp_transformer_layers"
    ),
    "images and sound are not read": (
        "vision_config audio_config boi_token_index eoi_token_index image_token_index mm_tokens_per_image "
        "image_token_id video_token_id vision_start_token_id vision_end_token_id media_placeholder_token_id "
        "projection_hidden_size projection_layer_norm_eps use_unified_vision_chunk video_placeholder "
        "language_model_only boi_token_id eoi_token_id image_seq_length multimodal_projector_bias projector_hidden_act "
        "spatial_merge_size vision_feature_layer"
    ),
    "how another program computes the same": (
        "auto_map attn_implementation cache_implementation chunk_size_feed_forward deterministic_flash_attn ep_size "
        "experts_implementation fused_bias_fc fused_dropout_add_ln gradient_checkpointing mamba_ssm_dtype "
        "name_or_path output_attentions output_hidden_states output_past output_scores pad_vocab_size_multiple "
        "pretraining_tp reference_compile reorder_and_upcast_attn return_dict return_dict_in_generate torchscript "
        "tf_legacy_loss transformers_version version use_bfloat16 use_cache use_flash_attn use_xentropy"
    ),
    "heads of other tasks": (
        "decoder_bias dense_seq_output finetuning_task id2label label2id num_labels sentence_transformers "
        "summary_activation summary_proj_to_labels summary_type summary_use_proj cross_attention_hidden_size"
    ),
    "said by other fields": "is_encoder_decoder tie_encoder_decoder qk_head_dim text_config",
}
UNUSED = {name: reason for reason, names in _UNUSED.items() for name in names.split()}
ALSO_UNUSED = ("_", "unsloth_")  # prefixes of a writer's own notes
NEUTRAL = {"partial_rotary_factor": 1.0}  # same as an absent field; transformers ignores other values in such a family
REFUSED_UNLESS = {  # a family that does not read a field supports only this value
    "add_cross_attention": False,
    "attention_bias": False,
    "causal": True,
    "clip_qkv": None,
    "is_decoder": False,
    "lm_head_bias": False,
    "mlp_bias": False,
    "pruned_heads": {},
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
}
SIZES = {
    "hidden": "hidden_size", "ffn": "intermediate_size", "layers": "num_hidden_layers", "vocab": "vocab_size",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head": "head_dim",
    "positions": "max_position_embeddings",
}  # fmt: skip


def sizes(**given: int | None) -> dict[str, Any]:
    """Defaults for the fields of sizes by the names in SIZES."""
    return {SIZES[name]: value for name, value in given.items()}


@dataclass(frozen=True)
class ConfigKeys:
    """The fields of one family.

    Attributes:
        defaults: Values of absent fields: the defaults of the family's configuration class in transformers.
        aliases: Alternative name -> the name that is read.
        nulls: Values of fields that are null. Default: like an absent field. None: no value, and no default.
        only: A field that is not read -> the only supported value.
        unused: More fields that do not change results of this family.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    nulls: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def but(self, unused: tuple[str, ...] = (), **entries: Mapping[str, Any]) -> "ConfigKeys":
        """A copy with entries added or replaced."""
        merged = {name: {**getattr(self, name), **added} for name, added in entries.items()}
        return replace(self, unused=(*self.unused, *unused), **merged)

    def fields(self, values: Mapping[str, Any], where: str, prefix: str = "") -> Fields:
        """The fields of a file by the names that are read. Raises ModelFileError if two names of a field disagree."""
        aliases, spelled, own = {**RENAMED, **self.aliases}, {}, {}
        for name, value in values.items():
            key = aliases.get(name, name)
            if value is None and key not in self.nulls:
                continue
            if key in own and own[key] not in (value, {}) and value != {}:
                raise ModelFileError(
                    f"{where}: {prefix}{spelled[key]} is {own[key]!r:.80} and {prefix}{name} is {value!r:.80}; both "
                    "mean the same: keep one"
                )
            if key not in own or own[key] == {}:
                own[key], spelled[key] = self.nulls[key] if value is None else value, name
        given = {name: value for name, value in own.items() if value is not None and value != {}}
        defaults = {
            name: value for name, value in self.defaults.items() if own.get(name, {}) == {} and value is not None
        }
        return Fields({**defaults, **given}, where, prefix, spelled=spelled)

    def is_unused(self, name: str) -> bool:
        """True if a field changes no result."""
        return name in UNUSED or name in self.unused or name.startswith(ALSO_UNUSED)

    def unknown(self, fields: Fields) -> list[str]:
        """The unread fields that may change results, each with its value.

        Raises ModelFileError if this family does not support the value of a field.
        """
        found, must = [], {**REFUSED_UNLESS, **self.only}
        for one, name in fields.unread():
            value = one.values[name]
            if name in must:
                if value != must[name]:
                    raise one.error(name, value, f"{json.dumps(must[name])}: another value is not supported here")
            elif value and value != NEUTRAL.get(name) and not self.is_unused(name):
                found.append(f"{one.name(name)} is {value!r:.60}")
        return found
