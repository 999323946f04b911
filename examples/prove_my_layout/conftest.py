import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forget-sum", action="store_true", help="enable the bug of my_model.MyNet: no sum in backward")


@pytest.fixture(scope="session")
def forget_sum(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--forget-sum"))
