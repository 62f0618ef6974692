"""The weight wire without vLLM: one message, its fingerprints and checks, and two transports for the bytes.

    learner's rank 0                                               engine's worker (rollout/receiver.py)
    ShmSender.stage ───────── bytes in /dev/shm ──────────────────▶ ShmReceiver.fetch ─────────┐
    DistributedSender.stage ─ broadcasts (gloo, NCCL) ─ transmit ──▶ DistributedReceiver.fetch ─┴▶ check_push ─▶ reload
          │                                                                                             │
          └─ Push: version, target, one entry per tensor ───▶ deliver ◀─── PushReport: refused, or what is held now

Every tensor has a fingerprint over its bytes, dtype and shape, taken by the sender and again by the receiver. A push in
which one tensor is unknown, missing, misshapen, damaged or not finite is refused by that tensor's name, and the engine
keeps the version that it had. The drafter is a second target of the same wire.

An engine in FP8 gets the same BF16 bytes and quantises them as it loads. The sender quantises them too, by the
reference in fp8.py, and sends fingerprints of what must come out; an engine with an FP8 KV cache also gets its scales.
What the engine then holds is read from where its kernels read it, and compared with the sender's like every other
fingerprint.

vLLM's TrainerWeightTransferEngine is not subclassed: it drives all engines through one synchronous client and gives
nothing back, while here each engine answers with a receipt.
"""
