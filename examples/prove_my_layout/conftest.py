import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forget-sum", action="store_true", help="plant the bug of my_model.MyNet")


@pytest.fixture(scope="session")
def forget_sum(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--forget-sum"))
