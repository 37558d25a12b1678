"""Stores for tests: sessions with sections that tell which they are, and what must hold of a store at rest."""

from llamakv.store.objects import CLAIMS, Objects
from llamakv.store.session_file import SessionReader, create_session, read_session, verify_session
from tests.store.samples import cells, contents, make_record


def save(root, name, *, seed=0, n=2, **options):
    """A session of ``n`` sections; those of other seeds have nothing in common with them."""
    sections = [cells(i, i + 1, n_bytes=300, seed=1000 * seed + i) for i in range(n)]
    return create_session(root / f"{name}.bin", make_record(n + 1, session_id=name), sections, **options)


def read_all(path):
    with SessionReader(path) as reader:
        return contents(reader.read(reader.info.sections))


def there(root):
    return {digest for digest, _ in Objects(root).all()}


def referenced(root):
    return {section.digest for path in root.glob("*.bin") for section in read_session(path).sections}


def left_over(root):
    """Everything in a store but its sessions, its objects and what it is made of."""
    known = {root / ".store", Objects(root).folder, Objects(root).folder / CLAIMS, Objects(root).folder / ".lock"}
    known |= {Objects(root).path_of(digest) for digest in there(root)} | set(root.glob("*.bin"))
    known |= {path.parent for path in known}
    return [path for path in root.rglob("*") if path not in known and not path.is_dir()]


def check(root):
    """Every session is sound, nothing else is there."""
    for path in root.glob("*.bin"):
        assert verify_session(path).is_sound
    assert there(root) == referenced(root)
    assert left_over(root) == []
