"""The methods of 38 ICLR 2026 papers as drop-in parts, and their claims as experiments that anyone can run.

A method is a package of its own: ``from assay.methods.vattention import vattention``. What it claims is in its card
(``assay show vattention``), and what was measured is in its study (``assay check vattention``).
Nothing heavy is imported here.
"""

__version__ = "0.1.0"
