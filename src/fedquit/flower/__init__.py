# SPDX-License-Identifier: Apache-2.0
"""Federated unlearning over Flower: real processes, TLS and nodes with keys of their own."""
