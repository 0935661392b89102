"""Tasks: the processes in which the service opens checkpoints, what they may reach, and who owns their work.

Input: a request, from a worker or a scan. Output: progress, and last a result or a problem, whatever a checkpoint
does to the process. docs/tasks.md says what each part is for: the fork server (child, task), the confinement
(confinement, seccomp, privileges) and the leases (worker, with `statekit.service.jobs`).
"""
