# SPDX-License-Identifier: Apache-2.0
"""What one round shares, between the stages and between scheduler and workers.

On the device, in persistent buffers: `trees` by request, `rows` of the verify batch, accepted
`paths`, the `meter`. Of one step: its `layout` of rows, what it `emitted`. On the host: the `plan`
of a `step`, the `kinds` of its requests, `marks` on the scheduler's output. `runtime` holds the
buffers of one engine together.
"""
