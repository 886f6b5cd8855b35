"""Write docs/gallery.md, its pictures and its page from the trained maps of the package.

python docs/gallery.py [RUN ...]        runs with snapshots: how their heads moved in training
"""

import sys
from pathlib import Path

from lengthwise.show.gallery import write_gallery

if __name__ == "__main__":
    print(write_gallery(Path(__file__).parent, sys.argv[1:]))
