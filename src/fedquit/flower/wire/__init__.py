# SPDX-License-Identifier: Apache-2.0
"""The contents of fedquit's Flower messages. The format is fixed: a server and its nodes may run different releases.

- `messages`: questions, answers and status queries as Flower records, and back; nonces.
- `tasks`: a client's task as the name of its class and its fields.
- `tensors`: model parameters as Flower arrays.
- `audits`: the one-run audit of a client that leaves.
- `checks`: whether an answer is what the question asked for.
"""

from fedquit.flower.wire.audits import (
    AuditModels,
    CanaryCounts,
    audit_from_records,
    audit_to_records,
    counts_from_body,
    counts_to_body,
)
from fedquit.flower.wire.checks import LARGEST_NUMBER, ExpectedReply, answer_from_records, expected_reply
from fedquit.flower.wire.errors import InvalidMessage
from fedquit.flower.wire.messages import (
    ACTION,
    ASK,
    MOST_PENDING,
    NONCE,
    PARAMS,
    PHASE_PLACES,
    QUERY,
    REPLY,
    TRAIN,
    Answer,
    PackedParams,
    Pending,
    Question,
    Serving,
    answer_to_records,
    attach_nonce,
    body_from_records,
    body_to_records,
    examples_from_body,
    question_from_records,
    question_to_records,
    receipts_from_body,
    receipts_to_body,
    refusal_to_records,
    requests_from_body,
    requests_to_body,
    require_nonce,
    return_nonce,
)
from fedquit.flower.wire.tasks import known_tasks, task_from_body, task_to_body
from fedquit.flower.wire.tensors import params_from_record, params_to_record

__all__ = [
    "ACTION",
    "ASK",
    "LARGEST_NUMBER",
    "MOST_PENDING",
    "NONCE",
    "PARAMS",
    "PHASE_PLACES",
    "QUERY",
    "REPLY",
    "TRAIN",
    "Answer",
    "AuditModels",
    "CanaryCounts",
    "ExpectedReply",
    "InvalidMessage",
    "PackedParams",
    "Pending",
    "Question",
    "Serving",
    "answer_from_records",
    "answer_to_records",
    "attach_nonce",
    "audit_from_records",
    "audit_to_records",
    "body_from_records",
    "body_to_records",
    "counts_from_body",
    "counts_to_body",
    "examples_from_body",
    "expected_reply",
    "known_tasks",
    "params_from_record",
    "params_to_record",
    "question_from_records",
    "question_to_records",
    "receipts_from_body",
    "receipts_to_body",
    "refusal_to_records",
    "requests_from_body",
    "requests_to_body",
    "require_nonce",
    "return_nonce",
    "task_from_body",
    "task_to_body",
]
