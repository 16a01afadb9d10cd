"""Prompt Markup Language: from XML or JSON to tokens and positions (Prompt Cache §3.2). Pure."""

from trunkline.router.pml.compiled import (
    CompiledModule,
    CompiledPrompt,
    CompiledScaffold,
    CompiledSchema,
    CompiledText,
    ParamSlot,
    PlacedText,
    PromptPiece,
    check_encoding,
    hint_layout,
    texts_message,
    to_layout,
)
from trunkline.router.pml.compiler import compile_prompt
from trunkline.router.pml.hints import likely_texts, lint
from trunkline.router.pml.joined import join_schemas
from trunkline.router.pml.json_form import prompt_from_json, prompt_to_json, schema_from_json, schema_to_json
from trunkline.router.pml.layout import compile_schema
from trunkline.router.pml.pml_error import ErrorCode, Mark, PmlError
from trunkline.router.pml.roles import PmlTokenizer
from trunkline.router.pml.tree import PromptDocument, SchemaDocument
from trunkline.router.pml.xml_form import parse_prompt, parse_schema, prompt_to_xml, schema_to_xml

__all__ = [
    "CompiledModule",
    "CompiledPrompt",
    "CompiledScaffold",
    "CompiledSchema",
    "CompiledText",
    "ErrorCode",
    "Mark",
    "ParamSlot",
    "PlacedText",
    "PmlError",
    "PmlTokenizer",
    "PromptDocument",
    "PromptPiece",
    "SchemaDocument",
    "check_encoding",
    "compile_prompt",
    "compile_schema",
    "hint_layout",
    "join_schemas",
    "likely_texts",
    "lint",
    "parse_prompt",
    "parse_schema",
    "prompt_from_json",
    "prompt_to_json",
    "prompt_to_xml",
    "schema_from_json",
    "schema_to_json",
    "schema_to_xml",
    "texts_message",
    "to_layout",
]
