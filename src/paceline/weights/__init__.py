"""Weight transfer from learner to engines, without vLLM: message, fingerprints, checks and two transports.

    learner's rank 0                                               engine's worker (rollout/receiver.py)
    ShmSender.stage ───────── bytes in /dev/shm ──────────────────▶ ShmReceiver.fetch ─────────┐
    DistributedSender.stage ─ broadcasts (gloo, NCCL) ─ transmit ──▶ DistributedReceiver.fetch ─┴▶ check_push ─▶ reload
          │                                                                                             │
          └─ Push: version, target, one entry per tensor ───▶ deliver ◀─── PushReport: refused, or fingerprints held

A push with an unknown, missing, misshapen, damaged or non-finite tensor is refused with the tensor's name, and the
engine keeps its version. FP8 engines get the same BF16 bytes and quantize them while loading. The sender quantizes them
too, with the reference in fp8.py, and sends the expected fingerprints of the memory that the kernels read.

vLLM's TrainerWeightTransferEngine is not used: it drives all engines through one synchronous client and returns no
result per engine.
"""
