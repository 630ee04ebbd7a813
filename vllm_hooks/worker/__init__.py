"""The worker half: a rank's blocks to codes and back."""
