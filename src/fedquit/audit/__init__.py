# SPDX-License-Identifier: Apache-2.0
"""What a model gives away: per-example scores, membership attacks, metrics, and the evaluation of a request."""
