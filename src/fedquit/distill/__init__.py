# SPDX-License-Identifier: Apache-2.0
"""FedQUIT on one model, without a federation: the virtual teacher, the losses and the training loop."""
