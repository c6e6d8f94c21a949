"""Many hosts: one Ray cluster per incarnation, over which the hosts of a job agree and watch each
other.

Ray is the coordination plane: membership, the table that hosts share, the detection of lost hosts.
Training processes stay children of each host's supervisor, as on a single host: it kills, reaps
and explains them, and numbers do not depend on who started them. Tensors travel over
torch.distributed. A job with one host starts no Ray.
"""
