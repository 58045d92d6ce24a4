# SPDX-License-Identifier: Apache-2.0
"""Starting and supervising a Flower deployment.

- `service`: what `fedquit flower serve` and `fedquit flower node` run.
- `supervision`: a run that is submitted again until it finishes.
- `stack`, `demo`: a whole deployment on one machine, and the demonstration that uses it.
- `commands`, `control`: how Flower's programs are started, and what is asked of a running SuperLink.
- `processes`, `reaper`, `logs`: processes that are restarted, none of which outlives its parent; their logs.
- `environment`, `keys`: environment variables, programs and ports; certificates and node keys.
"""
