"""Random weights of the golden models."""

import math

import torch


@torch.no_grad()
def randomise(model, generator: torch.Generator) -> None:
    """Weights under which every part matters: activations of order one, attention that is neither flat nor one-hot."""
    zero = model.config.model_type.startswith("minimax_m3")  # norms multiply by 1 + weight
    gemma, tied = model.config.model_type.startswith("gemma"), model.config.tie_word_embeddings
    hidden = model.config.get_text_config().hidden_size
    hybrid = model.config.model_type.startswith(("qwen3_5", "qwen3_next", "qwen4"))
    gemma4 = model.config.model_type.startswith(("gemma4", "gemma3n"))
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "A_log" in name:  # states that forget within a few tokens, and others that do not
            parameter.copy_(torch.linspace(-3.0, 1.0, parameter.numel()).view_as(parameter))
        elif "conv1d" in name:
            parameter.copy_(noise)
        elif hybrid and "norm" in name:  # multiplies by 1 + weight, but for that of linear attention
            parameter.copy_(0.25 * noise + (1.0 if "linear_attn" in name else 0.0))
        elif "dt_bias" in name:
            parameter.copy_(0.7 * noise)
        elif gemma4 and name.endswith(("q_norm.weight", "k_norm.weight")):  # scores have no other scale
            parameter.copy_(0.1 * noise + 0.5)
        elif name.endswith("modality_router.weight"):  # its input is divided by the width
            parameter.copy_(0.4 * noise * math.sqrt(hidden))
        elif name.endswith("_coefs.weight"):  # larger ones amplify rounding
            parameter.copy_(0.25 * noise)
        elif name.endswith("router.scale"):
            parameter.copy_(math.sqrt(hidden) * (1 + 0.25 * noise))
        elif name.endswith("per_expert_scale"):
            parameter.copy_(1 + 0.25 * noise)
        elif name.endswith("embed_tokens_per_layer.weight"):
            parameter.copy_(0.35 * noise)
        elif "norm" in name:  # Gemma 1 to 3 multiply by 1 + weight
            parameter.copy_(0.25 * noise + (gemma_norm(name) + gemma4 if gemma else 0.0 if zero else 1.0))
        elif name.endswith(("sinks", "position_bias", "_hc.base", "hc_base")):
            parameter.copy_(noise)
        elif name.endswith("experts.gate_up_proj"):  # wide enough for clamped gates to bite
            parameter.copy_(noise * (4.0 / math.sqrt(hidden)))
        elif name.endswith(("_hc.scale", "hc_scale")):
            parameter.copy_(0.7 + 0.2 * noise)
        elif name.endswith("correction_bias"):
            parameter.copy_(0.2 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.7 * noise)
        elif "embed_tokens" in name:
            # Tied, a token's own embedding must not win by being still in the residual stream.
            size = 0.05 if gemma else 0.3 if tied else 1.0
            parameter.copy_(size / getattr(model.config, "embedding_multiplier", 1.0) * noise)
        else:
            parameter.copy_(noise * (2.0 / math.sqrt(parameter.shape[-1])))
    for name, buffer in model.named_buffers():
        if "correction_bias" in name or "expert_bias" in name:
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        elif name.endswith("tid2eid"):
            experts = model.config.n_routed_experts
            rows = [torch.randperm(experts, generator=generator)[: buffer.shape[1]] for _ in range(buffer.shape[0])]
            buffer.copy_(torch.stack(rows))
        elif name.endswith("layer_scalar"):
            buffer.copy_(0.8 + 0.1 * torch.randn(buffer.shape, generator=generator))


def gemma_norm(name: str) -> float:
    """Blocks add twice what a norm gives, and the logits are large enough for soft caps to bite."""
    return 3.0 if name == "model.norm.weight" else 1.0 if name.endswith(POST_NORMS) else 0.0


POST_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
