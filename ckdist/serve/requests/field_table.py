"""The known fields of requests, the faces that know them, and the rule for each.

A face is a kind of request (a key of `prepare.KINDS`). The names are those of OpenAI, Anthropic, vLLM, llama-server,
Ollama, OpenRouter, text-generation-webui and the servers of embeddings. A name with a dot is a field of an object.
`check_fields` handles unknown names.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckdist.engine.sampling_params import PARAMETERS
from ckdist.errors import RequestError

MAX_NAME = 64  # characters of a field's name that are shown
MAX_IGNORED = 64  # names of one request that are reported

CHATS = frozenset(["chat", "response", "messages", "count_tokens", "apply_template", "tokenize"])
ANTHROPIC = frozenset(["messages", "count_tokens"])
RESPONSES = frozenset(["response"])
ITEMS = ANTHROPIC | RESPONSES  # one answer, as blocks or items
COMPLETIONS = frozenset(["completion"])
LLAMA = frozenset(["llama_completion", "infill"])
INFILL = frozenset(["infill"])
TEXTS = COMPLETIONS | LLAMA
GENERATES = CHATS | TEXTS
EMBEDS = frozenset(["embedding", "llama_embedding"])
RANKS = frozenset(["rerank"])
SCORES = frozenset(["score"])
VECTORS = EMBEDS | RANKS | SCORES
TOKENIZES = frozenset(["tokenize"])
EVERY = GENERATES | VECTORS | {"detokenize"}


# Values that remove nothing from the messages. Claude Code sends the last one with every request.
NO_EDITS = ({}, [], {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
# `max_tokens` has a row of its own.
SAMPLING_NAMES = [name for item in PARAMETERS for name in (item.name, *item.metadata["also"]) if name != "max_tokens"]
USAGE = "stream_options.include_usage stream_options.continuous_usage_stats"


@dataclass(frozen=True)
class Honoured:
    """The field is read by the module `by` of this folder."""

    by: str


@dataclass(frozen=True)
class Neutral:
    """The field is not supported.

    Only `values`, which change nothing, are accepted. Any other value is a 400 that ends with `remedy`.
    """

    values: tuple[Any, ...] = ()
    remedy: str = ""

    def __contains__(self, value: Any) -> bool:
        """Compares as JSON does: True and 1 differ, 1 and 1.0 do not."""
        return any(value == own and (type(value) is bool) == (type(own) is bool) for own in self.values)


@dataclass(frozen=True)
class Harmless:
    """The answer does not depend on the field, for this `reason`."""

    reason: str


Rule = Honoured | Neutral | Harmless


@dataclass(frozen=True)
class Row:
    """One rule for some names on some faces."""

    faces: frozenset[str]
    names: tuple[str, ...]
    rule: Rule


def honoured(by: str, faces: frozenset[str], names: str) -> Row:
    """A row of fields that the module `by` reads. `names` are separated by spaces."""
    return Row(faces, tuple(names.split()), Honoured(by))


def refused(names: str, *values: Any, remedy: str = "", faces: frozenset[str] = EVERY) -> Row:
    """A row of fields that accept only `values`."""
    return Row(faces, tuple(names.split()), Neutral(values, remedy))


def harmless(reason: str, names: str, faces: frozenset[str] = EVERY) -> Row:
    """A row of fields without effect."""
    return Row(faces, tuple(names.split()), Harmless(reason))


HONOURED = (
    # The prefix cache.
    honoured("engine_fields", EVERY - {"detokenize"}, "cache_salt cache_prompt"),
    honoured("adapter_choice", EVERY, "model lora"),
    # The queue.
    honoured("engine_fields", EVERY - {"detokenize"}, "priority service_tier"),
    # Drafts.
    honoured("engine_fields", GENERATES, "spec speculative.n_max speculative.type speculative.n_min speculative.p_min"),
    # Length, end and number of answers.
    honoured(
        "params",
        GENERATES,
        "max_completion_tokens max_tokens n_predict num_predict max_new_tokens stop stream "
        "include_stop_str_in_output skip_special_tokens",
    ),
    honoured(
        "params",
        GENERATES - ITEMS,
        f"n n_cmpl best_of return_token_ids return_tokens return_tokens_as_token_ids {USAGE}",
    ),
    honoured("params", GENERATES, "id_slot slot_id"),
    honoured("params", GENERATES - ITEMS, "timings_per_token"),
    honoured("anthropic", ANTHROPIC, "system stop_sequences"),
    honoured("responses", RESPONSES, "max_output_tokens instructions input include"),
    # Sampling.
    honoured("sampling", GENERATES, f"logit_bias stop_token_ids {' '.join(SAMPLING_NAMES)}"),
    # Structure of the answer.
    honoured(
        "structure",
        GENERATES,
        "response_format json_schema grammar format guided_json guided_regex guided_choice guided_grammar "
        "guided_whitespace_pattern structured_outputs.json structured_outputs.regex structured_outputs.choice "
        "structured_outputs.grammar structured_outputs.json_object structured_outputs.whitespace_pattern",
    ),
    honoured("anthropic", ANTHROPIC, "output_config.format output_format"),
    honoured("responses", RESPONSES, "text.format"),
    # Chats: messages, tools, reasoning.
    honoured("chat", CHATS - RESPONSES, "messages"),
    honoured("chat", CHATS, "reasoning_format continue_final_message add_generation_prompt add_special_tokens"),
    honoured("chat", CHATS - ITEMS, "logprobs top_logprobs n_probs"),
    honoured("tools", CHATS, "tools functions tool_choice function_call parallel_tool_calls"),
    honoured(
        "thinking",
        CHATS,
        "chat_template_kwargs documents think thinking enable_thinking reasoning_effort reasoning.effort "
        "reasoning.enabled verbosity thinking.type thinking.budget_tokens reasoning.max_tokens thinking_budget "
        "thinking_budget_tokens thinking_token_budget reasoning_budget reasoning_budget_tokens",
    ),
    honoured("anthropic", ANTHROPIC, "output_config.effort"),
    honoured("responses", RESPONSES, "text.verbosity metadata store"),
    honoured("kept_items", RESPONSES, "previous_response_id conversation"),
    # Completions.
    honoured("completion", TEXTS, "prompt"),
    honoured("completion", COMPLETIONS, "echo suffix add_special_tokens top_logprobs"),
    honoured("completion", TEXTS, "logprobs n_probs"),
    honoured("llama_completion", LLAMA, "response_fields"),
    honoured("infill", INFILL, "input_prefix input_suffix input_extra"),
    # Vectors and tokens.
    honoured("embedding", frozenset(["embedding"]), "input encoding_format dimensions"),
    honoured("embedding", frozenset(["llama_embedding"]), "content input prompt embd_normalize"),
    honoured("embedding", RANKS, "query documents texts top_n return_documents return_text"),
    honoured("embedding", SCORES, "text_1 text_2"),
    honoured("embedding", RANKS | SCORES, "use_activation activation"),
    honoured("embedding", VECTORS, "truncate_prompt_tokens add_special_tokens"),
    honoured("tokens", TOKENIZES, "content prompt with_pieces return_token_strs parse_special add_special"),
    honoured("tokens", frozenset(["detokenize"]), "tokens"),
)

# These fields would change the answer: constraints, ways of sampling, other models, further contents, tenants.
REFUSED = (
    # Constraints on the text.
    refused("grammar_lazy", False),
    refused("structured_outputs.disable_additional_properties", False, remedy="set it in the schema", faces=GENERATES),
    refused("grammar_triggers preserved_tokens bad_words allowed_token_ids", []),
    refused("structural_tag", ""),
    refused("sequence_bias", {}),
    refused("n_indent", 0),
    refused("t_max_predict_ms", 0, -1, remedy="limit max_tokens instead"),
    refused("moderation", remedy="moderation is not supported"),
    # Sampling.
    refused("use_beam_search early_stopping", False),
    refused("num_beams length_penalty tfs_z encoder_repetition_penalty guidance_scale cfg_scale", 1),
    refused("do_sample", True, remedy="set temperature to 0 for greedy text"),
    refused("top_a epsilon_cutoff eta_cutoff smoothing_factor no_repeat_ngram_size", 0),
    refused("adaptive_target", -1),
    refused("penalty_prompt negative_prompt", ""),
    refused("penalize_nl penalize_newline", True, remedy="newlines are penalised like other tokens"),
    refused("control_vectors logits_processors", []),
    refused("vllm_xargs kv_transfer_params", {}),
    # Contents of the prompt.
    refused("chat_template", ""),
    refused("mm_processor_kwargs media_io_kwargs", {}),
    refused("multimodal_data image_data images prompt_embeds plugins", []),
    refused("audio web_search_options"),
    refused("modalities", [], ["text"], remedy="only text is generated"),
    refused("truncate_prompt_tokens", -1, remedy="shorten the prompt", faces=GENERATES),
    refused("truncate", False, remedy="give truncate_prompt_tokens", faces=VECTORS),
    refused("options", {}, remedy="move its fields to the top of the request"),
    refused(
        "input_type task instruction query_instruction prompt_name", "", remedy="put it into the text", faces=VECTORS
    ),
    refused("late_chunking", False, faces=VECTORS),
    refused("normalize normalized", True, remedy="use /embedding with embd_normalize", faces=VECTORS),
    refused("embedding_types embedding_type", "float", ["float"], faces=VECTORS),
    refused("max_tokens_per_doc max_chunks_per_doc", remedy="give truncate_prompt_tokens", faces=RANKS),
    # Fields of other paths.
    refused("echo", False, remedy="use /v1/completions", faces=CHATS),
    refused("suffix", "", remedy="use /v1/completions or /infill", faces=CHATS | LLAMA),
    refused("prompt", "", [], remedy="put it in messages", faces=CHATS - RESPONSES - TOKENIZES),
    refused("messages", [], remedy="put them in input", faces=RESPONSES),
    refused("messages tools functions", [], remedy="use /v1/chat/completions", faces=TEXTS),
    refused("input_prefix input_suffix", "", remedy="use /infill", faces=TEXTS - INFILL),
    refused("add_special_tokens", True, faces=LLAMA),
    # Contents of the answer.
    refused("prompt_logprobs", False, remedy="use echo with logprobs in /v1/completions"),
    refused("post_sampling_probs return_hidden_states reasoning_in_content", False),
    refused("n n_cmpl best_of", 1, remedy="use /v1/chat/completions", faces=ITEMS),
    refused("logprobs return_token_ids return_tokens", False, remedy="use /v1/chat/completions", faces=ITEMS),
    refused("top_logprobs n_probs", 0, remedy="use /v1/chat/completions", faces=ITEMS),
    refused("return_tokens_as_token_ids", False, remedy="use /v1/chat/completions", faces=ITEMS),
    refused("timings_per_token", False, remedy="use /v1/chat/completions", faces=ITEMS),
    refused("include_reasoning parse_tool_calls", True),
    refused("reasoning.exclude", False, faces=CHATS),
    refused("reasoning_format", "none", "auto", faces=TEXTS | VECTORS),
    refused("thinking_budget thinking_budget_tokens thinking_token_budget", -1, remedy="use a chat", faces=TEXTS),
    refused("reasoning_budget reasoning_budget_tokens", -1, remedy="use a chat", faces=TEXTS),
    # Services of a provider.
    refused("prompt", remedy="prompts are not stored: send all input", faces=RESPONSES),
    refused("background", False, remedy="use stream", faces=RESPONSES),
    refused("mcp_servers", [], remedy="call the servers' tools yourself, as functions", faces=CHATS),
    refused("speculative.p_split", 0.1, remedy="drafts have no branches: use speculative.p_min"),
    refused("container", remedy="this server does not run code", faces=ANTHROPIC),
    refused("context_management", *NO_EDITS, remedy="send only the messages that you need", faces=CHATS),
)

LIBRARY = "it chooses the library for grammars"
DRAFTS = "drafts are verified, so the answer is the same without them"
LOADER = "it controls how Ollama loads a model; this model is already loaded"
CHARGED = "it is about a provider's charges, storage or users"
HARMLESS = (
    harmless("without adapters, the server has one model, which answers under any name", "models route provider"),
    harmless(CHARGED, "user safety_identifier session_id trace inference_geo"),
    harmless(CHARGED, "metadata store", faces=EVERY - RESPONSES),
    harmless("keys are read from headers", "api_key"),
    harmless("it names the request or the client", "request_id client_metadata"),
    harmless("versions and betas differ in other fields", "anthropic_version anthropic_beta betas"),
    harmless("the prefix cache needs no marks or keys", "prompt_cache_key cache_control"),
    harmless("cached blocks are kept as long as there is room", "prompt_cache_retention prompt_cache_options"),
    harmless("only whole prefixes are reused", "n_cache_reuse"),
    harmless("it changes the speed, not the answer", "prediction speed backend_sampling"),
    harmless(DRAFTS, "speculative"),
    harmless("it chooses a copy of the model, and all of them give the same answer", "data_parallel_rank"),
    harmless("the context is never shifted: an answer ends when it is full", "n_keep n_discard num_keep"),
    harmless("a prompt that does not fit is refused, never truncated", "truncation transforms num_ctx"),
    harmless(
        "JSON has only the white space of whitespace_pattern",
        "structured_outputs.disable_any_whitespace",
        faces=GENERATES,
    ),
    harmless(LIBRARY, "guided_decoding_backend"),
    harmless(LIBRARY, "structured_outputs.backend structured_outputs._backend", faces=GENERATES),
    harmless(LIBRARY, "structured_outputs.disable_fallback", faces=GENERATES),
    harmless("it only affects tokenizers in Python, which are not used", "spaces_between_special_tokens"),
    harmless("pictures are not supported", "allowed_local_media_path"),
    harmless("calls are always streamed", "tool_stream"),
    harmless("the server runs no tools", "max_tool_calls", faces=RESPONSES),
    harmless("progress and speed are not part of the answer", "return_progress return_metrics usage"),
    harmless("every answer of this kind has its usage", USAGE, faces=ITEMS),
    harmless("signs of life on a stream are not part of the answer", "sse_ping_interval"),
    harmless("padding hides lengths; the text is the same", "stream_options.include_obfuscation", faces=GENERATES),
    harmless(
        "reasoning is always given in full",
        "reasoning.summary reasoning.generate_summary thinking.display",
        faces=CHATS,
    ),
    harmless("it only acts together with a field that is refused", "smoothing_curve adaptive_decay"),
    harmless(LOADER, "num_batch num_gpu main_gpu num_thread numa low_vram f16_kv use_mmap"),
    harmless(LOADER, "use_mlock vocab_only keep_alive"),
)

ROWS = (*HONOURED, *REFUSED, *HARMLESS)


def _by_face() -> dict[str, dict[str, Rule]]:
    rules: dict[str, dict[str, Rule]] = {face: {} for face in EVERY}
    for row in ROWS:
        for face in row.faces:
            for name in row.names:
                assert name not in rules[face], f"two rules for {name} on {face}"
                rules[face][name] = row.rule
    return rules


RULES = _by_face()
OBJECTS = {
    face: frozenset(name.partition(".")[0] for name in rules if "." in name) - {"speculative"}
    for face, rules in RULES.items()
}  # objects whose fields have rules of their own


def check_fields(face: str, body: dict[str, Any], strict: bool) -> tuple[str, ...]:
    """Returns the unknown names of `body`, shortened. A field that is null is absent.

    Raises RequestError for a value that is not neutral, and with `strict` for an unknown name.
    """
    rules, unknown = RULES[face], list[str]()
    for name, value in _named(body, OBJECTS[face]):
        rule = rules.get(name)
        if rule is None:
            unknown.append(name)
        elif isinstance(rule, Neutral) and value not in rule:
            remedy = rule.remedy or "leave it out"
            raise RequestError(f"{name} is not supported by this server; {remedy}", name, "unsupported_parameter")
    if strict and unknown:
        name = unknown[0][:MAX_NAME]
        close = difflib.get_close_matches(name, [n for n, rule in rules.items() if isinstance(rule, Honoured)], n=1)
        meant = f", did you mean {close[0]!r}?" if close else ""
        raise RequestError(f"unknown field {name!r}{meant}", name, "unknown_parameter")
    return tuple(name[:MAX_NAME] for name in unknown[:MAX_IGNORED])


def _named(body: dict[str, Any], objects: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of the fields that are not null. The fields of `objects` replace these: object.field."""
    for name, value in body.items():
        if name in objects and isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items() if item is not None)
        elif value is not None and name not in objects:
            yield name, value
