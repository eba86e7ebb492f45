"""One folder a method. ``from assay.methods.vattention import vattention``.

Methods that live elsewhere join in: each folder of ``ASSAY_METHODS`` holds method folders of its own.
"""

import os

__path__ += [
    os.path.abspath(os.path.expanduser(folder))
    for folder in os.environ.get("ASSAY_METHODS", "").split(os.pathsep)
    if folder
]
