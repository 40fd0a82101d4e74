from fixtures import *  # noqa: F403
