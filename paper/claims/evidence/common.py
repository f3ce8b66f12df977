from paper.claims.shared.common import *  # noqa: F403 - until every chapter that imports it from here is converted
