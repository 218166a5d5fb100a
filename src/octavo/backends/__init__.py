"""The devices' interpreters of programs.

Imported before torch is: OpenMP reads how threads wait when it is loaded. Spinning, its default, makes a
step 5 to 15 times slower when another process wants the cores, and a server always shares them.
"""

from octavo.config import env

env.set_default("OMP_WAIT_POLICY", "passive")
