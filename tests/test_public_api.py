# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

import fedquit


def test_all_public_names_can_be_had_and_no_others_are_shown() -> None:
    assert fedquit.__all__ == sorted(fedquit.__all__)
    assert dir(fedquit) == fedquit.__all__
    for name in fedquit.__all__:
        assert getattr(fedquit, name) is not None
    assert fedquit.unlearn.__module__ == "fedquit.distill.unlearning"
    assert fedquit.virtual_logits.__module__ == "fedquit.distill.virtual_teacher"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'unlern'"):
        _ = fedquit.unlern
