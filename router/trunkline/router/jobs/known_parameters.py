"""What is known of other servers' parameters, and not applied: hints, which change what an answer costs and never
its text, and parameters that would change the answer and are refused.

A parameter that an endpoint's model declares is not looked up here, so a row may stand for the other endpoints.
"""

from __future__ import annotations

from typing import Any, Final

from trunkline.router.jobs.parameter_table import Known

_CHAT: Final = frozenset({"chat"})
_TEXT: Final = frozenset({"completions"})
_RESPONSES: Final = frozenset({"responses"})
_MESSAGES: Final = frozenset({"messages"})
_TRANSLATED: Final = _RESPONSES | _MESSAGES
_GENERATING: Final = _CHAT | _TEXT | _TRANSLATED
_NOT_GENERATING: Final = frozenset({"tokenize", "embeddings", "score", "rerank", "ollama"})
_RENDERING: Final = _GENERATING | {"tokenize"}
"""Names of endpoints, for `Known.at`."""


def _hints(names: str, why: str, at: frozenset[str] = frozenset()) -> Known:
    return Known(tuple(names.split()), None, why, at)


def _refused(names: str, *neutral: Any, why: str = "", at: frozenset[str] = _GENERATING) -> Known:
    return Known(tuple(names.split()), neutral, why, at)


HINTS: Final = (
    _hints("user metadata safety_identifier request_id rid", "labels for the client's own records"),
    _hints("store service_tier inference_geo", "where and how a provider runs or keeps the request"),
    _hints(
        "prompt_cache_retention prompt_cache_options cache_control",
        "caching; everything is cached as long as there is room",
    ),
    _hints(
        "prediction speculation", "about the speed of an answer; they act where text is generated", _NOT_GENERATING
    ),
    _hints(
        "nvext agent_hints agent_hint", "about requests to come; they act where text is generated", _NOT_GENERATING
    ),
    _hints(
        "kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port "
        "bootstrap_room data_parallel_rank disagg_params",
        "what other servers' routers are told about a request",
    ),
    _hints(
        "provider route transforms usage keep_alive cache_prompt id_slot",
        "which server answers, and what it keeps",
    ),
    _hints(
        "dry_base dry_allowed_length dry_sequence_breakers dry_penalty_last_n xtc_threshold mirostat_tau "
        "mirostat_eta dynatemp_exponent smoothing_curve",
        "they only matter beside parameters that are refused",
    ),
    _hints("stream_options", "a stream always ends with the usage", _TRANSLATED),
    _hints("parallel_tool_calls", "about calls of tools, which there are not", _TEXT),
    _hints("max_tool_calls", "bounds calls of a provider's own tools, of which there are none"),
)
"""Accepted with any value."""

_ONE_ANSWER: Final = "the answer is a single one; send several requests, or use /v1/chat/completions"
_TIMINGS: Final = "timings belong to /v1/chat/completions and /v1/completions"
_TOKENS: Final = "log-probabilities and token ids belong to /v1/chat/completions and /v1/completions"

REFUSED: Final = (
    # Decoding
    _refused("logits_processors logits_processor custom_logit_processor custom_params"),
    _refused("bad_words_ids", why="`bad_words_ids` is not supported; use `bad_words`"),
    _refused("no_repeat_ngram_size dry_multiplier xtc_probability mirostat mirostat_mode", 0),
    _refused("typical_p typical tfs_z", 1),
    _refused("top_a eta_cutoff epsilon_cutoff smoothing_factor dynatemp_range penalty_alpha", 0),
    _refused("do_sample", True, why="`do_sample` is not supported; greedy decoding is `temperature` 0"),
    _refused("watermark", False),
    _refused("min_keep n_keep n_indent t_max_predict_ms", 0),
    _refused("samplers session_params options"),
    _refused("repetition_detection"),
    _refused("lora_path lora_request lora_name adapter_id adapter_source adapters", ""),
    _refused("vllm_xargs sampling_params extra_args parameters"),
    # Grammars
    _refused(
        "guided_whitespace_pattern",
        why='`guided_whitespace_pattern` is not supported; JSON is compact, unless `whitespace` is "any"',
    ),
    _refused("guided_decoding_backend"),
    _refused("grammar", why="`grammar` is not supported; use `guided_grammar`, which is EBNF"),
    _refused("structural_tag", why="`structural_tag` is not supported; use `structured_outputs`"),
    _refused(
        "response_format",
        {"type": "text"},
        why="`response_format` belongs to /v1/chat/completions; use `text.format`",
        at=_RESPONSES,
    ),
    _refused(
        "response_format",
        {"type": "text"},
        why="the format of an answer is given in `output_config.format`",
        at=_MESSAGES,
    ),
    # Prompts
    _refused("prompt_embeds input_embeds input_ids"),
    _refused("suffix", ""),
    _refused("documents", at=_RENDERING - _CHAT),
    _refused("chat_template", at=_RENDERING),
    _refused("continue_final_message", False, at=_RENDERING),
    _refused("safe_prompt", False),
    _refused("prompt", why="prompts are not kept here; send `input`, or `pml`", at=_RESPONSES),
    _refused("prompt", why="send `messages`, or `pml`", at=_MESSAGES),
    _refused("mm_processor_kwargs media_io_kwargs"),
    _refused("inputs raw template image_data audio_data video_data", ""),
    _refused(
        "extra_body", why="`extra_body` is an option of a client library; its fields belong into the body itself"
    ),
    # Answers
    _refused("n", 1, why=_ONE_ANSWER, at=_TRANSLATED),
    _refused("best_of", 1, why="`best_of` is a parameter of /v1/completions only"),
    _refused("use_beam_search", False, why=_ONE_ANSWER, at=_TRANSLATED),
    _refused("beam_width", 1, why=_ONE_ANSWER, at=_TRANSLATED),
    _refused("length_penalty", 0, 1, why=_ONE_ANSWER, at=_TRANSLATED),
    _refused("early_stopping", False, why=_ONE_ANSWER, at=_TRANSLATED),
    _refused("echo return_full_text", False, why="`echo` belongs to /v1/chat/completions and /v1/completions"),
    _refused("logprobs prompt_logprobs return_token_ids", False, why=_TOKENS, at=_TRANSLATED),
    _refused("return_tokens_as_token_ids", False, why=_TOKENS, at=_TRANSLATED),
    _refused("return_timings", False, why=_TIMINGS, at=_TRANSLATED),
    _refused("top_logprobs", 0, why=_TOKENS, at=_MESSAGES | _TEXT),
    _refused("decoder_input_details return_hidden_states", False),
    _refused("logprob_token_ids token_ids_logprob"),
    _refused("top_n_tokens n_probs top_logprobs_num", 0),
    _refused("details return_logprob return_text_in_logprobs", False),
    _refused("timings_per_token", False, why="`timings_per_token` is not supported; use `return_timings`"),
    _refused("stream_reasoning", True),
    _refused("format", "", why="`format` is not supported; use `response_format`"),
    _refused("spaces_between_special_tokens", True),
    _refused("verbosity", "medium"),
    # Conversations
    _refused("functions", why="`functions` is not supported; use `tools`"),
    _refused("function_call", "none", "auto", why="`function_call` is not supported; use `tool_choice`"),
    _refused("audio web_search_options"),
    _refused("modalities", ["text"]),
    _refused("tools", at=_TEXT, why="`tools` belong to conversations; use /v1/chat/completions"),
    _refused("tool_choice", "none", "auto", at=_TEXT, why="`tool_choice` belongs to conversations"),
    _refused("messages", at=_TEXT, why="`messages` belong to /v1/chat/completions; send `prompt`"),
    _refused("messages", at=_RESPONSES, why="`messages` belong to /v1/chat/completions; send `input`"),
    _refused(
        "input instructions text previous_response_id conversation include",
        at=_GENERATING - _RESPONSES,
        why="this is a parameter of /v1/responses only",
    ),
    _refused("background", False, at=_GENERATING - _RESPONSES, why="this is a parameter of /v1/responses only"),
    _refused(
        "system output_config output_format mcp_servers container context_management",
        at=_GENERATING - _MESSAGES,
        why="this is a parameter of /v1/messages only",
    ),
    _refused("max_completion_tokens", at=_TEXT, why="send `max_tokens`"),
    _refused("chat_template_kwargs", at=_TEXT, why="`chat_template_kwargs` belong to conversations"),
    _refused("add_generation_prompt", True, at=_TRANSLATED | _TEXT),
    _refused("add_special_tokens", False, at=_TRANSLATED),
    _refused(
        "reasoning_effort thinking reasoning",
        at=_TEXT,
        why="how much to think is said to a chat template, so it belongs to conversations",
    ),
    _refused("enable_thinking", at=_TEXT, why="`enable_thinking` belongs to conversations"),
    _refused("document_modules", False, at=_TEXT, why="`document_modules` belongs to conversations; use `pml`"),
    _refused(
        "thinking_budget thinking_token_budget reasoning_budget",
        -1,
        at=_TEXT,
        why="thoughts belong to conversations",
    ),
    _refused("reasoning_effort thinking", at=_RESPONSES, why="send `reasoning`"),
    _refused("reasoning_effort reasoning", at=_MESSAGES, why="send `thinking` or `output_config.effort`"),
    _refused("include_reasoning separate_reasoning", True, at=_TRANSLATED | _TEXT),
    _refused("parallel_tool_calls", True, at=_MESSAGES, why="send `tool_choice.disable_parallel_tool_use`"),
)
"""Refused, unless the value asks for nothing."""

KNOWN: Final = (*HINTS, *REFUSED)
