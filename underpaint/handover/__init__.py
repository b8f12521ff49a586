"""From understanding to generation, in other processes: messages over a channel, tensors and pages through memory."""
