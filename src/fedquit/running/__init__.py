# SPDX-License-Identifier: Apache-2.0
"""From a recipe to results: setup, training cache, unlearning, recovery, costs and what lies on disk."""
