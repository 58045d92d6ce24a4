# SPDX-License-Identifier: Apache-2.0
"""Starting and supervising a Flower deployment: keys, processes, restarts, the demo."""
