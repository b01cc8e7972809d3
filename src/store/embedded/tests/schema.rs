//! Files and rows of every released schema are kept for ever and must open, and steps lead from one
//! schema to the next. The steps are planted here, as rows of an earlier version are.

use super::super::disk::{Disk, LockedFolder, open_existing};
use super::super::files::Files;
use super::super::rows::{CleanMarker, FileIdentity, JournalPosition, SealedPosition};
use super::super::schema::{SCHEMA, SchemaStep, identity, upgrade};
use super::super::segment_shelf::SegmentShelf;
use super::super::tables::{self, write};
use super::media::{Random, SimulatedDisk};
use super::*;
use crate::codec::{Malformed, Reader, StoredField, decode, encode};
use crate::embedded::tables::OrFault;
use crate::row;
use crate::stored_body::{StoredBody, StoredContent};
use cresset_ledger::{
    Account, AccountStatus, Adjustment, Application, AskedGeneration, Attempt, AttemptState,
    Balance, Balances, BucketAmounts, Consumption, Crashes, EntryKind, JournalEntry, JournalHead,
    PeriodUse, PeriodUses, ReceiptFacts, ReceiptProof, RequestRecord, Reservation, SamplingValue,
    StateError,
    audit::{self, AuditSource},
};
use redb::{ReadableDatabase, ReadableTableMetadata, WriteTransaction};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("embedded/tests/golden").join(name)
}

fn units(units: u64) -> Microcredits {
    Microcredits::new(units).unwrap()
}

fn split(trial: u64, premium: u64) -> BucketAmounts {
    BucketAmounts { trial: units(trial), premium: units(premium) }
}

fn balance() -> Balance {
    Balance { credited: units(100), debited: units(20), reserved: units(3) }
}

fn scoped() -> RequestKey {
    RequestKey { application: Some(ApplicationId(id(6))), ..key(9) }
}

fn attempt(number: u32, state: AttemptState) -> Attempt {
    let completed = state == AttemptState::Completed;
    Attempt {
        id: AttemptId(id(number.into())),
        number,
        retry_of: (number > 1).then(|| AttemptId(id(u128::from(number) - 1))),
        credential: CredentialId(id(5)),
        boot: BootId(id(7)),
        state,
        failure: (state == AttemptState::Failed).then_some(FailureCode::DeadlineExceeded),
        finish_reason: completed.then_some(FinishReason::Length),
        cancel_requested: state == AttemptState::Cancelled,
        prices: Prices { revision: 2, input: 3, cached_input: 4, output: 5 },
        reserved: split(6, 7),
        charged: split(0, 1),
        usage: completed.then_some(Usage {
            prompt_tokens: 8,
            cached_tokens: 2,
            completion_tokens: 9,
        }),
        created_at: UnixMillis(10),
        started_at: (state != AttemptState::Queued).then_some(UnixMillis(11)),
        finished_at: state.is_terminal().then_some(UnixMillis(12)),
    }
}

fn request(states: &[AttemptState]) -> RequestRecord {
    let attempts = (1..).zip(states).map(|(number, state)| attempt(number, *state)).collect();
    RequestRecord {
        key: scoped(),
        fingerprint: [0xfe; 32],
        session: SessionId(id(3)),
        model: ModelId(id(4)),
        stream: true,
        attempts,
    }
}

fn entry(kind: EntryKind) -> JournalEntry {
    JournalEntry {
        sequence: 17,
        at: UnixMillis(18),
        account: AccountId(id(1)),
        kind,
        amount: split(1, 2),
        after: Balances { trial: balance(), premium: Balance::default() },
        hash: [0xcd; 16],
    }
}

fn credential(application: Option<u128>) -> Credential {
    let Command::IssueCredential { credential } = issue(5, 1, application) else { unreachable!() };
    Credential { expires_at: Some(UnixMillis(13)), revoked_at: Some(UnixMillis(14)), ..credential }
}

/// What rows of this schema say of uses; those of schema 1 have that of one period.
fn used(schema: u32) -> CalendarUse {
    let of = |number| {
        let use_of = |number| PeriodUse {
            number,
            reserved: Consumption { units: units(33), tokens: 34 },
            spent: Consumption { units: units(35), tokens: 36 },
        };
        let mut uses = vec![use_of(number)];
        uses.extend((schema > 1).then_some(use_of(number + 2)));
        let forgotten = if schema > 1 { 32 } else { number };
        PeriodUses { latest: number, forgotten, uses }
    };
    CalendarUse { day: of(37), month: of(38) }
}

fn budgets() -> Budgets {
    let limit = |alert_percent| Some(SpendingLimit { units: units(39), alert_percent });
    Budgets { day: limit(None), month: limit(Some(40)) }
}

fn receipted() -> StoredBody {
    let proof = ReceiptProof {
        record: id(21),
        grade: "like".into(),
        like: Some("sister".into()),
        release: id(22),
        files: vec![[23; 32], [24; 32]],
        version: "0.2.0".into(),
        executable: [25; 32],
        lockfile: [26; 32],
    };
    let asked = AskedGeneration {
        prompt: [27; 32],
        seed: 28,
        sampling: vec![SamplingValue::new("temperature", 0.5)],
        max_tokens: 29,
        min_tokens: 30,
        ignore_eos: true,
    };
    let receipt = ReceiptFacts { proof, asked, answer_tokens: [31; 32], answer_text: [32; 32] };
    let content = StoredContent::Plain(bytes::Bytes::from_static(b"answer"));
    StoredBody { expires_at: UnixMillis(17), content, receipt: None }.with_receipt(Some(receipt))
}

/// Calls back with a row of every kind, one for each way in which this schema lays it out.
fn each_row(schema: u32, mut row: impl Row) {
    use AttemptState::{Cancelled, Completed, Failed, Queued, Running};
    let reserved = Reservation {
        key: scoped(),
        attempt: AttemptId(id(2)),
        boot: BootId(id(7)),
        amount: split(6, 7),
        tokens: 41,
    };
    let of_attempt = (scoped(), AttemptId(id(2)));
    let account = |status| {
        let (id, name) = (AccountId(id(1)), "Ünïcode".to_owned());
        let account = Account::new(id, name, "basic".into(), UnixMillis(15));
        Account { status, in_flight: 2, ..account }
    };
    row.row("format", FileIdentity { schema: 1, epoch: 2 });
    row.row("tenure", CleanMarker { boot: BootId(id(7)), clean: true });
    let head = JournalHead { sequence: 16, hash: [0xab; 16] };
    row.row("progress", JournalPosition { head, clock: UnixMillis(16) });
    let body = |content| StoredBody { expires_at: UnixMillis(17), content, receipt: None };
    let bytes = bytes::Bytes::from_static(b"answer");
    row.row("body", body(StoredContent::Plain(bytes.clone())));
    row.row("body compressed", body(StoredContent::Deflated { plain_bytes: 1_024, bytes }));
    row.row("sum", 18_u64);
    row.row("body with receipt", receipted());
    row.row("account", account(AccountStatus::Active));
    row.row("account suspended", account(AccountStatus::Suspended));
    limits(account(AccountStatus::Active), used(schema), &mut row);
    row.row("balances", Balances { trial: balance(), premium: balance() });
    let application = Application {
        id: ApplicationId(id(6)),
        account: AccountId(id(1)),
        name: "app".into(),
        created_at: UnixMillis(2),
    };
    row.row("application", application);
    row.row("key", credential(None));
    row.row("token", credential(Some(6)));
    row.row("digest", CredentialId(id(5)));
    adjustments(&mut row);
    row.row("request", request(&[Failed, Failed, Completed]));
    for (name, state) in [("queued", Queued), ("running", Running), ("cancelled", Cancelled)] {
        row.row(&format!("request {name}"), request(&[state]));
    }
    row.row("reservation", reserved);
    let (count, boot) = (1, BootId(id(7)));
    row.row("crashes", Crashes { count, boot, at: UnixMillis(19) });
    row.row("entry grant", entry(EntryKind::Grant { reference: "opening".into() }));
    let (key, attempt) = of_attempt;
    row.row("entry reserve", entry(EntryKind::Reserve { key, attempt }));
    row.row("entry settle", entry(EntryKind::Settle { key, attempt }));
    row.row("entry release", entry(EntryKind::Release { key, attempt }));
    row.row("index", ());
    row.row("set back", vec![3_u64, 17]);
    row.row("sealed", SealedPosition { head, fully_audited_at: UnixMillis(20) });
    row.row("segment", head);
}

fn limits(account: Account, used: CalendarUse, row: &mut impl Row) {
    let (note, stores_answers) = (Some("a note".into()), false);
    let budgets = budgets();
    row.row("key limited", Credential { budgets, used: used.clone(), ..credential(None) });
    row.row("account limited", Account { note, stores_answers, budgets, used, ..account });
}

fn adjustments(row: &mut impl Row) {
    let (bucket, units) = (Bucket::Trial, units(100));
    row.row("granted", Adjustment { bucket, units, is_debit: false });
    row.row("debited", Adjustment { bucket, units, is_debit: true });
    row.row("entry debit", entry(EntryKind::Debit { reference: "back".into() }));
}

trait Row {
    fn row<T: StoredField + PartialEq + std::fmt::Debug>(&mut self, name: &str, row: T);
}

/// Lines of `name: row`, in hex; the name is the key that the row is stored under.
struct Printed(String);

impl Row for &mut Printed {
    fn row<T: StoredField + PartialEq + std::fmt::Debug>(&mut self, name: &str, row: T) {
        writeln!(self.0, "{name}: {}", hex::encode(encode(name.as_bytes(), &row))).unwrap();
    }
}

/// Rows as some schema stored them.
struct Stored(String);

impl Row for &Stored {
    fn row<T: StoredField + PartialEq + std::fmt::Debug>(&mut self, name: &str, row: T) {
        let line = self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        let stored = hex::decode(line.unwrap_or_else(|| panic!("no {name} was kept"))).unwrap();
        assert_eq!(decode::<T>(name.as_bytes(), &stored).unwrap(), row, "{name}");
    }
}

#[test]
fn rows_of_every_schema_can_be_read() {
    for schema in 1..=SCHEMA {
        let rows = fs::read_to_string(golden(&format!("schema-{schema}/rows.txt"))).unwrap();
        each_row(schema, &Stored(rows));
    }
}

#[test]
fn this_schema_writes_what_is_kept_of_it() {
    let mut printed = Printed(String::new());
    each_row(SCHEMA, &mut printed);
    assert_eq!(
        printed.0,
        fs::read_to_string(golden(&format!("schema-{SCHEMA}/rows.txt"))).unwrap()
    );
}

/// The folder that a release with this schema left behind.
fn kept(schema: u32) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in File::ALL {
        fs::copy(golden(&format!("schema-{schema}/{}", file.name())), dir.path().join(file.name()))
            .unwrap();
    }
    dir
}

const HOUR: u64 = 3_600_000;

/// Writes the files that are kept for this build's schema. It is run once, when a schema is
/// released; files that exist are never written again.
#[test]
#[ignore = "writes the files that the tests read"]
fn keep_this_schema() {
    let fixture = Fixture::new(1_000);
    let store = fixture.open();
    for request in 1..=4 {
        store.submit_blocking(admit(request, request, store.boot(), 10)).unwrap();
    }
    store.submit_blocking(settle(1, 1, 4)).unwrap();
    drop(store);
    fixture.clock.set(1_000_000 + 25 * HOUR);
    let store = fixture.open();
    store.submit_blocking(admit(5, 5, store.boot(), 10)).unwrap();
    let body = bytes::Bytes::from_static(b"the answer");
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(store.put_body(key(5), body, UnixMillis(u64::MAX))).unwrap();
    store.submit_blocking(settle(5, 5, 6)).unwrap();
    // Attempts 2 of requests 2 and 3: one fails for good, one is cancelled.
    for request in [2, 3] {
        store.submit_blocking(admit(request, request + 10, store.boot(), 10)).unwrap();
    }
    store.submit_blocking(release(2, 12)).unwrap();
    store.submit_blocking(Command::RequestCancel { key: key(3) }).unwrap();
    let taken = Command::Debit {
        account: AccountId(id(1)),
        bucket: Bucket::Premium,
        units: units(7),
        reference: "back".into(),
    };
    store.submit_blocking(taken).unwrap();
    let limit = Some(SpendingLimit { units: units(1_000), alert_percent: Some(80) });
    let (owner, period) = (BudgetOwner::Key(CredentialId(id(1))), BudgetPeriod::Month);
    store.submit_blocking(Command::SetBudget { owner, period, limit }).unwrap();
    drop(store);
    let folder = golden(&format!("schema-{SCHEMA}"));
    fs::create_dir(&folder).expect("a schema that was released never changes");
    for file in File::ALL {
        fs::copy(fixture.dir.path().join(file.name()), folder.join(file.name())).unwrap();
    }
    let mut printed = Printed(String::new());
    each_row(SCHEMA, &mut printed);
    fs::write(folder.join("rows.txt"), printed.0).unwrap();
}

#[test]
fn folders_of_every_schema_can_be_used() {
    for schema in 1..=SCHEMA {
        let dir = kept(schema);
        let clock = Arc::new(TestClock::at(1_000_000 + 26 * HOUR));
        let store =
            Store::open(&StoreConfig::folder(dir.path()), clock, Limits::default()).unwrap();
        assert_sound(&store);
        assert_eq!(spent(&store), (17, 0));
        let state = |request| {
            store
                .read()
                .now()
                .unwrap()
                .request(&key(request))
                .now()
                .unwrap()
                .map(|record| record.latest().state)
        };
        let (completed, failed) = (Some(AttemptState::Completed), Some(AttemptState::Failed));
        assert_eq!(
            [1, 2, 3, 4, 5, 6].map(state),
            [completed, failed, failed, failed, completed, None],
            "{schema}"
        );
        assert_eq!(store.body(&key(5)).now().unwrap().unwrap(), "the answer");
        assert_eq!(
            refusal(store.submit_blocking(admit(1, 90, store.boot(), 10))),
            Refusal::ResultExpired
        );
        assert!(is_admitted(&store.submit_blocking(admit(3, 23, store.boot(), 10))));
        store.submit_blocking(settle(3, 23, 1)).unwrap();
        assert_sound(&store);
        drop(store);
        let database = open_existing(&dir.path().join("ledger.redb")).unwrap();
        assert_eq!(identity(&database, "ledger").unwrap().schema, SCHEMA);
    }
}

/// Builds of schema 1 forgot uses where the time was set back, so audits cannot compare these.
#[test]
fn a_ledger_that_was_set_back_before_schema_2_says_so() {
    for set_back in [false, true] {
        let dir = kept(1);
        if set_back {
            let database = open_existing(&dir.path().join("ledger.redb")).unwrap();
            write(&database, |txn| {
                let mut meta = txn.open_table(tables::META).or_fault()?;
                tables::put(&mut meta, tables::SET_BACK, &vec![3_u64])
            })
            .unwrap();
        }
        let files = super::super::open_folder(
            &EmbeddedConfig::new(dir.path()),
            super::super::PageCheck::Everything,
        );
        let misses = files.unwrap().snapshot().unwrap().misses_uses(AccountId(id(1)));
        assert_eq!(misses.unwrap(), set_back);
    }
}

/// A row that only these tests have, as its version 1 was and as its version 2 is.
#[derive(Debug, PartialEq)]
struct FirstVersion {
    number: u32,
}

#[derive(Debug, PartialEq)]
struct SecondVersion {
    number: u32,
    added: u32,
}

row!(FirstVersion { number });

impl StoredField for SecondVersion {
    const VERSION: u8 = 2;

    fn write(&self, out: &mut Vec<u8>) {
        self.number.write(out);
        self.added.write(out);
    }
    fn read(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self { number: StoredField::read(input)?, added: StoredField::read(input)? })
    }
    fn read_earlier(_: u8, input: &mut Reader<'_>) -> Result<Self, Malformed> {
        let FirstVersion { number } = StoredField::read(input)?;
        Ok(Self { number, added: 7 })
    }
}

#[test]
fn a_row_of_an_earlier_version_is_read_and_one_of_a_later_version_is_not() {
    let (key, first) = (b"row", encode(b"row", &FirstVersion { number: 3 }));
    assert_eq!(
        decode::<SecondVersion>(key, &first).unwrap(),
        SecondVersion { number: 3, added: 7 }
    );
    let row = SecondVersion { number: 4, added: 5 };
    let second = encode(key, &row);
    assert_eq!(decode::<SecondVersion>(key, &second).unwrap(), row);
    let refused = decode::<FirstVersion>(key, &second).unwrap_err().to_string();
    assert!(refused.contains("unknown row version"), "{refused}");
}

/// An audit finds a sum that is not that of the answers.
#[test]
fn a_wrong_sum_of_answers_is_a_violation() {
    for wrong in [None, Some(1_u64)] {
        let dir = kept(SCHEMA);
        let database = open_existing(&dir.path().join("bodies.redb")).unwrap();
        write(&database, |txn| {
            let mut sums = txn.open_table(tables::ANSWER_BYTES).or_fault()?;
            sums.remove(&id(1).as_bytes()[..]).or_fault()?;
            let Some(wrong) = wrong else { return Ok(()) };
            tables::put(&mut sums, id(1).as_bytes(), &wrong)
        })
        .unwrap();
        drop(database);
        let config = EmbeddedConfig::new(dir.path());
        let report = super::super::inspect(&config).unwrap();
        assert!(report.violations.len() == 1, "{:?}", report.violations);
        assert!(report.violations[0].contains("has answers of"), "{:?}", report.violations);
    }
}

// Steps that only these tests have: one changes rows, one adds a table, one takes long. None may
// happen twice.

const ADDED: tables::Definition = redb::TableDefinition::new("added");
/// Key of a request → how often it was counted.
const COUNTED: tables::Definition = redb::TableDefinition::new("counted");

fn rename_accounts(file: File, txn: &WriteTransaction) -> Result<(), StateError> {
    if file == File::Ledger {
        let mut accounts = txn.open_table(tables::ACCOUNTS).or_fault()?;
        let rows: Vec<_> = tables::rows::<Account>(&accounts)?.collect::<Result<_, _>>()?;
        for (key, row) in rows {
            tables::put(&mut accounts, &key, &Account { name: row.name + "!", ..row })?;
        }
    }
    Ok(())
}

fn add_table(_: File, txn: &WriteTransaction) -> Result<(), StateError> {
    let mut added = txn.open_table(ADDED).or_fault()?;
    let count = added.len().or_fault()?.to_be_bytes();
    tables::put(&mut added, &count, &())
}

fn requests_of_file(file: File) -> tables::Definition {
    if file == File::Ledger { tables::REQUESTS } else { tables::ARCHIVE }
}

fn count_requests(file: File, txn: &WriteTransaction) -> Result<(), StateError> {
    let requests = txn.open_table(requests_of_file(file)).or_fault()?;
    let mut counted = txn.open_table(COUNTED).or_fault()?;
    for row in tables::rows::<RequestRecord>(&requests)? {
        let (key, _) = row?;
        let before: u64 = tables::get(&counted, &key)?.unwrap_or_default();
        tables::put(&mut counted, &key, &(before + 1))?;
    }
    Ok(())
}

fn steps() -> Vec<SchemaStep> {
    let released = super::super::schema::STEPS.iter().copied();
    released.chain([rename_accounts as SchemaStep, add_table, count_requests]).collect()
}

/// Opens the files of a folder as a build with these steps would.
fn open_planted(dir: &Path) -> Files {
    let disk: Arc<dyn Disk> = Arc::new(LockedFolder::lock(dir).unwrap());
    let [ledger, bodies] =
        [File::Ledger, File::Bodies].map(|file| open_existing(&dir.join(file.name())).unwrap());
    let files = Files { ledger, bodies, segments: Arc::new(SegmentShelf::new(disk)) };
    files.upgrade(&steps()).unwrap();
    files
}

/// Checks that each step happened once to the database of a file.
fn took_each_step_once(database: &redb::Database, file: File, after: impl std::fmt::Display) {
    assert_eq!(identity(database, "it").unwrap().schema as usize, 1 + steps().len(), "{after}");
    let txn = database.begin_read().unwrap();
    let table = |definition| tables::open(&txn, definition).unwrap();
    assert_eq!(table(ADDED).len().unwrap(), 1, "{after}");
    if file == File::Ledger {
        for row in tables::rows::<Account>(&table(tables::ACCOUNTS)).unwrap() {
            let (_, Account { name, .. }) = row.unwrap();
            assert_eq!(name.find('!'), Some(name.len() - 1), "{after}: {name}");
        }
    }
    let counted = table(COUNTED);
    assert_eq!(counted.len().unwrap(), table(requests_of_file(file)).len().unwrap(), "{after}");
    for row in tables::rows::<u64>(&counted).unwrap() {
        assert_eq!(row.unwrap().1, 1, "{after}");
    }
}

/// Opens a folder whose upgrade was killed, and checks that all of it is there.
fn ends_the_upgrade(dir: &Path, before: &audit::AuditReport) {
    let files = open_planted(dir);
    took_each_step_once(&files.ledger, File::Ledger, "kills");
    took_each_step_once(&files.bodies, File::Bodies, "kills");
    let after = audit::everything(&files.snapshot().unwrap(), &audit::unpaced).unwrap();
    assert_eq!((after.violations, after.entries), (vec![], before.entries));
    assert_eq!(after.requests, before.requests);
}

/// Not a test of its own: those below start it in a folder with a ledger, and kill it.
#[test]
#[ignore = "only does something in a folder with a ledger"]
fn upgrade_until_killed() {
    if Path::new("ledger.redb").exists() {
        let _armed = cresset_base::failpoint::arm();
        open_planted(Path::new("."));
    }
}

/// The process that upgrades a folder.
fn upgrading(dir: &Path) -> process::Command {
    let name = "embedded::tests::schema::upgrade_until_killed";
    let mut child = process::Command::new(std::env::current_exe().unwrap());
    child.args([name, "--exact", "--ignored"]).current_dir(dir);
    child.stdout(process::Stdio::null()).stderr(process::Stdio::null());
    child
}

/// The process ends at every place of an upgrade in turn: the next one goes on from there.
#[test]
fn an_upgrade_goes_on_from_where_it_was_killed() {
    let dir = kept(SCHEMA);
    let before = Store::inspect(&StoreConfig::folder(dir.path())).unwrap();
    for point in [
        "store::upgraded=return",
        "store::upgraded=1*off->return",
        "store::bodies_upgraded=return",
        "store::upgraded=return",
        "store::upgraded=1*off->return",
    ] {
        let killed = upgrading(dir.path()).env("FAILPOINTS", point).status().unwrap();
        assert_eq!(killed.code(), None, "{point} was not reached");
    }
    ends_the_upgrade(dir.path(), &before);
}

/// An upgrade is killed at random times, until one ends.
#[test]
#[ignore = "minutes: a ledger of 100 000 requests, upgraded and killed again and again"]
fn a_hundred_thousand_requests_survive_kills_of_their_upgrade() {
    let dir = tempfile::tempdir().unwrap();
    let config = StoreConfig::folder(dir.path());
    Store::init(&config).unwrap();
    super::bench::History::begin(dir.path(), 100_000, 200).go_on();
    let before = Store::inspect(&config).unwrap();
    let mut random = Random(4);
    let (mut killed, mut longest) = (0, 20);
    loop {
        let mut child = upgrading(dir.path()).spawn().unwrap();
        // Later kills come later, so that one upgrade ends, also on a busy machine.
        let patience = 5 + random.below(longest) as u64;
        longest += longest / 4;
        std::thread::sleep(std::time::Duration::from_millis(patience));
        if child.try_wait().unwrap().is_some() {
            break;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        killed += 1;
    }
    println!("{killed} kills survived");
    ends_the_upgrade(dir.path(), &before);
    assert!(killed > 3, "the upgrade was hardly killed");
}

/// Power is lost at every write of an upgrade in turn: the upgrade goes on from there, and each
/// step happens once.
#[test]
fn an_interrupted_upgrade_goes_on() {
    let steps = steps();
    let mut random = Random(3);
    let mut upgrade_losing_power = |after: u64| {
        let disk = SimulatedDisk::default();
        disk.load(kept(SCHEMA).path());
        disk.fail_after(after);
        let bring_up = |disk: &SimulatedDisk| {
            File::ALL
                .into_iter()
                .try_for_each(|file| upgrade(&disk.database(file)?, &[file], &steps).map(drop))
        };
        let failed = bring_up(&disk).is_err() || disk.is_broken();
        disk.lose_power(&mut random);
        bring_up(&disk).unwrap();
        for file in File::ALL {
            took_each_step_once(&disk.database(file).unwrap(), file, after);
        }
        // A build without these steps leaves the file alone.
        let older = faults::Bench::open(&disk, &TestClock::at(1)).err().unwrap().to_string();
        assert!(older.contains("a newer build has used it"), "{older}");
        failed
    };
    let losses = (0..1_000).take_while(|&after| upgrade_losing_power(after)).count();
    assert!(losses > 10, "an upgrade was hardly interrupted");
}

/// A backup made before an update is upgraded when it is restored.
#[test]
fn a_backup_of_an_older_schema_is_restored() {
    let dir = kept(SCHEMA);
    let database = open_existing(&dir.path().join("ledger.redb")).unwrap();
    let found = upgrade(&database, &File::ALL, &steps()).unwrap();
    assert_eq!(found.schema as usize, 1 + steps().len());
    let unknown = upgrade(&database, &File::ALL, &[]).unwrap_err().to_string();
    assert!(unknown.contains("restore a backup made before the update"), "{unknown}");
}
