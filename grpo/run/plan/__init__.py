"""What a run will take before it is started: layouts of its devices, their memory and their time.

``python -m grpo.run.plan model.name=... num_gpus=16``; see ``docs/scale.md``.
"""
