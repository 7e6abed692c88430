"""Addresses, credentials and certificates of Redis: which are valid, and that no text shows a password."""

import ssl
import traceback

import pytest

from services.streams.connection.client import RedisUnavailableError, client
from services.streams.connection.credentials import (
    CA_FILE,
    PASSWORD_FILE,
    SENTINEL_PASSWORD_FILE,
    USERNAME,
    TrustedCertificates,
    server_credentials,
)
from services.streams.connection.url import parse_redis_url, redacted

VARIABLES = (USERNAME, PASSWORD_FILE, SENTINEL_PASSWORD_FILE, CA_FILE)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "shown", "hosts", "service", "db", "tls"),
    [
        ("redis://h", "redis://h:6379/0", [("h", 6379)], None, 0, False),
        ("redis://h:1/", "redis://h:1/0", [("h", 1)], None, 0, False),
        ("rediss://a.b-c:6380/2", "rediss://a.b-c:6380/2", [("a.b-c", 6380)], None, 2, True),
        ("redis://[::1]:7/0", "redis://[::1]:7/0", [("::1", 7)], None, 0, False),
        ("redis+sentinel://a,b:5/s", "redis+sentinel://a:26379,b:5/s/0", [("a", 26379), ("b", 5)], "s", 0, False),
        ("rediss+sentinel://a/main/3", "rediss+sentinel://a:26379/main/3", [("a", 26379)], "main", 3, True),
    ],
)
def test_the_parts_of_an_address(url, shown, hosts, service, db, tls):
    address = parse_redis_url(url)
    assert (str(address), redacted(url)) == (shown, shown)
    assert (list(address.hosts), address.service, address.db, address.tls) == (hosts, service, db, tls)
    assert (address.username, address.password) == (None, None)


@pytest.mark.parametrize(
    ("login", "username", "password"),
    [
        (":pw", None, "pw"),
        ("user:pw", "user", "pw"),
        ("user", "user", None),
        ("user:p%40w%2F", "user", "p@w/"),
        ("user:a@b/c#d?e:f", "user", "a@b/c#d?e:f"),
    ],
)
@pytest.mark.parametrize("place", ["redis://{}@h:1/0", "redis+sentinel://{}@h:1,i:2/main/0"])
def test_credentials_in_an_address(login, username, password, place):
    address = parse_redis_url(place.format(login))
    assert (address.username, address.password) == (username, password)
    assert redacted(place.format(login)) == str(address) == place.replace("{}@", "")
    assert password is None or password not in repr(address)


@pytest.mark.parametrize(
    ("url", "value", "why"),
    [
        ("", None, "no value, and PENSTOCK_REDIS is not set"),
        ("h:6379", "h:6379", "unknown scheme"),
        ("secret@h:6379", "h:6379", "unknown scheme"),
        ("http://u:secret@h/0", "http://h/0", "unknown scheme"),
        ("redis://:secret@", "redis://", "'' is not a host and a port from 1 to 65535"),
        ("redis://:secret@h:0/0", "redis://h:0/0", "'h:0' is not a host and a port from 1 to 65535"),
        ("redis://:secret@h:99999/0", "redis://h:99999/0", "'h:99999' is not a host and a port from 1 to 65535"),
        ("redis://:secret@h:x/0", "redis://h:x/0", "'h:x' is not a host and a port from 1 to 65535"),
        ("redis://:secret@h/x", "redis://h/x", "a database number must follow the host"),
        ("redis://h/0?password=secret", "redis://h/0", "a part after ? or # is not supported"),
        ("redis://default:secret", "redis://***", "'***' is not a host and a port from 1 to 65535"),
        ("redis://default:secret/0", "redis://***", "'***' is not a host and a port from 1 to 65535"),
        ("redis://default:1/secret", "redis://***", "a database number must follow the host"),
        ("redis://default:1?secret", "redis://default:1", "a part after ? or # is not supported"),
        ("redis+sentinel://a:1,default:secret/main", "redis+sentinel://***", "'***' is not a host and a port"),
        ("redis://h:0/0", "redis://h:0/0", "'h:0' is not a host and a port from 1 to 65535"),
        ("default:secret", "***", "unknown scheme"),
        ("default:secret://h", "***", "unknown scheme"),
        ("http://default:secret", "http://***", "unknown scheme"),
        ("redis://:secret@a:1,b:2/0", "redis://a:1,b:2/0", "a Redis Cluster is not supported"),
        (
            "redis+sentinel://:secret@a:1,b:2",
            "redis+sentinel://a:1,b:2",
            "a service's name and a database number must follow the hosts",
        ),
        (
            "redis+sentinel://:secret@a:1/main/x",
            "redis+sentinel://a:1/main/x",
            "a service's name and a database",
        ),
    ],
)
def test_invalid_addresses_are_named_without_their_password(url, value, why):
    with pytest.raises(RedisUnavailableError) as raised:
        client(url)
    text = "".join(traceback.format_exception(raised.value))
    assert "secret" not in text.partition("RedisUnavailableError:")[2]
    assert "secret" not in redacted(url)
    assert "--redis" in str(raised.value)
    assert "PENSTOCK_REDIS" in str(raised.value)
    assert why in str(raised.value)
    assert "rediss+sentinel://host:port,host:port/SERVICE/db" in str(raised.value)
    assert value is None or f" {value!r} is not valid" in str(raised.value)


def test_a_password_file_is_read_again_and_never_shown(tmp_path, monkeypatch):
    file = tmp_path / "password"
    file.write_text("first secret\n")
    monkeypatch.setenv(PASSWORD_FILE, str(file))
    monkeypatch.setenv(USERNAME, "penstock")
    [provider] = server_credentials(parse_redis_url("redis://h/0")).values()
    assert provider.get_credentials() == ("penstock", "first secret")
    file.write_text("second secret\r\n")
    assert provider.get_credentials() == ("penstock", "second secret")
    redis = client("redis://h/0")
    for holder in (provider, redis, redis.connection_pool, redis.connection_pool.make_connection()):
        assert "secret" not in repr(holder) + str(holder)


def test_credentials_in_an_address_take_precedence(tmp_path, monkeypatch):
    file = tmp_path / "password"
    file.write_text("secret")
    monkeypatch.setenv(USERNAME, "penstock")
    monkeypatch.setenv(PASSWORD_FILE, str(file))
    own = server_credentials(parse_redis_url("redis://me:mine@h/0"))
    assert own == {"username": "me", "password": "mine"}
    assert server_credentials(parse_redis_url("redis://:mine@h/0")) == {"username": None, "password": "mine"}
    named = server_credentials(parse_redis_url("redis://me@h/0"))["credential_provider"]
    assert named.get_credentials() == ("me", "secret")
    monkeypatch.delenv(USERNAME)
    unnamed = server_credentials(parse_redis_url("redis://h/0"))["credential_provider"]
    assert unnamed.get_credentials() == ("secret",)


@pytest.mark.parametrize("variable", [PASSWORD_FILE, SENTINEL_PASSWORD_FILE])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xff\xfe", "cannot be read: not text"),
    ],
)
def test_a_password_file_that_cannot_be_used_is_named(tmp_path, monkeypatch, variable, content, why):
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv(variable, str(file))
    with pytest.raises(RedisUnavailableError) as raised:
        client("redis+sentinel://h/main")
    assert str(raised.value).startswith(
        f"{variable}: {str(file)!r} is not valid: expected a file with a password; it {why}"
    )


def test_a_user_without_a_password_is_rejected(monkeypatch):
    with pytest.raises(
        RedisUnavailableError,
        match=rf"^--redis: 'me' is not valid: expected {PASSWORD_FILE} with .*; a user needs a password$",
    ):
        client("redis://me@h/0")
    monkeypatch.setenv(USERNAME, "penstock")
    with pytest.raises(
        RedisUnavailableError,
        match=rf"^{USERNAME}: 'penstock' is not valid: expected {PASSWORD_FILE} with .*; a user needs a password$",
    ):
        client("redis://h/0")


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), ("no certificate", "NO_CERTIFICATE")])
def test_a_bundle_that_cannot_be_used_is_named(tmp_path, monkeypatch, content, why):
    file = tmp_path / "ca.crt"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv(CA_FILE, str(file))
    with pytest.raises(RedisUnavailableError) as raised:
        client("rediss://h/0")
    assert str(raised.value).startswith(f"{CA_FILE}: {str(file)!r} is not valid: expected a PEM file")
    assert why in str(raised.value).partition("; ")[2]
    client("redis://h/0")  # needs no certificates


def test_certificates_are_checked_and_the_context_is_shared():
    trust = TrustedCertificates()
    context = trust.get()
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)
    assert trust.get() is context
    pool = client("rediss://h/0").connection_pool
    assert pool.make_connection().ssl_context is pool.make_connection().ssl_context
