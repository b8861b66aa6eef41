import sys

from tpkernels.cli import main

sys.exit(main())
