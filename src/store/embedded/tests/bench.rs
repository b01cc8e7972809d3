//! Measures the cost of the writer and of the audit by themselves. It prints times and asserts
//! nothing about them: `cargo test --release --lib store::embedded::tests::bench -- --ignored
//! --nocapture`. Pairs a second under load: `cresset bench --ledger`.

use super::kill::run_and_kill;
use super::media::Random;
use super::*;
use crate::backend::LedgerReader;
use crate::queue::{WriteAction, WriteJob};
use crate::shared::StoreShared;
use crate::stored_body::{StoredBody, StoredContent};
use crate::writer::Writer;
use crate::{AuditPolicy, OpenProgress, prepare};
use cresset_ledger::audit::unpaced;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Measures the writer's own time for a pair, on a disk that costs nothing.
#[test]
#[ignore = "a measurement"]
fn writer_alone() {
    const BATCHES: u128 = 20;
    const WIDE: u128 = 256;
    let mut best = Duration::MAX;
    for _ in 0..10 {
        let (_, _, mut bench) = super::faults::opened(Microcredits::MAX.get());
        let boot = bench.shared.boot();
        let began = Instant::now();
        for batch in 0..BATCHES {
            // Request ids are spread as random ones would be.
            let requests = || {
                (0..WIDE).map(move |number| {
                    (batch * WIDE + number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
                })
            };
            bench.detach(requests().map(|request| admit(request, request, boot, 10)).collect());
            bench.detach(requests().map(|request| settle(request, request, 1)).collect());
        }
        best = best.min(began.elapsed());
        assert_eq!(u128::from(bench.premium().debited.get()), BATCHES * WIDE);
    }
    println!("{:.1} us a pair", best.as_secs_f64() * 1e6 / (BATCHES * WIDE) as f64);
}

/// Measures the cost of auditing a million entries: time, and memory beyond the page caches.
#[test]
#[ignore = "a measurement"]
fn audit_of_a_million_entries() {
    let fixture = Fixture::new(Microcredits::MAX.get());
    let store = fixture.open();
    let boot = store.boot();
    for round in 0..4 {
        std::thread::scope(|scope| {
            for client in 0..256 {
                let store = &store;
                scope.spawn(move || {
                    for number in 0..490 {
                        let request = ((round * 256 + client) * 490 + number + 1_u128)
                            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
                        store.submit_blocking(admit(request, request, boot, 10)).unwrap();
                        store.submit_blocking(settle(request, request, 1)).unwrap();
                    }
                });
            }
        });
        let began = Instant::now();
        let report = store.audit().unwrap();
        assert!(report.ok);
        println!(
            "{} entries: {:.1} s, {} KiB at most",
            report.entries,
            began.elapsed().as_secs_f64(),
            most_memory()
        );
    }
    drop(store);
    for (name, open) in
        [("node", Store::open as fn(&_, _, _) -> _), ("command", Store::open_briefly)]
    {
        let began = Instant::now();
        drop(open(&fixture.config(), Arc::new(fixture.clock.clone()), Limits::default()).unwrap());
        println!("opening and closing for a {name}: {:.1} s", began.elapsed().as_secs_f64());
    }
}

/// Builds the ledger that a node leaves behind after `CRESSET_BENCH_REQUESTS` settled requests
/// (10 million) of `CRESSET_BENCH_ACCOUNTS` accounts (200), 100 000 a day, and measures how it
/// starts. It is kept in the folder `CRESSET_BENCH_FOLDER`, where one is named; a ledger that lies
/// there already is measured as it is.
#[test]
#[ignore = "a measurement: many minutes, and some 10 GB of disk"]
fn history_of_ten_million_requests() {
    let setting = |name| std::env::var(name).ok();
    let number = |name, usual| setting(name).map_or(usual, |text| text.parse().unwrap());
    let requests = number("CRESSET_BENCH_REQUESTS", 10_000_000);
    let accounts = number("CRESSET_BENCH_ACCOUNTS", 200);
    let scratch = tempfile::tempdir().unwrap();
    let folder = setting("CRESSET_BENCH_FOLDER").map_or(scratch.path().into(), PathBuf::from);
    let config = StoreConfig::folder(&folder);
    if !Store::exists(&config) {
        std::fs::create_dir_all(&folder).unwrap();
        Store::init(&config).unwrap();
        let began = Instant::now();
        History::begin(&folder, requests, accounts).go_on();
        println!("built in {:.0} s", began.elapsed().as_secs_f64());
    }
    for (name, bytes) in sizes(&folder) {
        println!("{name}: {:.0} MB", bytes as f64 / 1e6);
    }
    drop(open("after an orderly stop", &folder));
    forget_pages(&folder);
    drop(open("after an orderly stop, nothing in memory", &folder));
    drop(open("after an orderly stop, again", &folder));
    run_and_kill(&folder, KILLED_AFTER);
    drop(open("after a kill", &folder));
    run_and_kill(&folder, KILLED_AFTER);
    forget_pages(&folder);
    let store = open("after a kill, nothing in memory", &folder);
    let began = Instant::now();
    let report = store.audit().unwrap();
    assert!(report.ok, "{:?}", report.violations);
    let spent = began.elapsed().as_secs_f64();
    println!("audit of everything: {spent:.0} s, {} entries", report.entries);
}

/// Opens a ledger and says how long that took.
fn open(after: &str, folder: &Path) -> Store {
    let began = Instant::now();
    let clock = Arc::new(cresset_base::SystemClock);
    let store = Store::open(&StoreConfig::folder(folder), clock, Limits::default()).unwrap();
    println!("{after}: open after {:.2} s", began.elapsed().as_secs_f64());
    store
}

/// The files of a ledger and their sizes on the disk, bytes.
fn sizes(folder: &Path) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if entry.path().extension().is_some_and(|extension| extension == "redb") {
            found.push((name, entry.metadata().unwrap().blocks() * 512));
        }
    }
    found.sort();
    found
}

/// Takes the files out of the page cache.
fn forget_pages(folder: &Path) {
    for (name, _) in sizes(folder) {
        let file = std::fs::File::open(folder.join(name)).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }
}

/// Settled requests with answers before a process is killed.
const KILLED_AFTER: usize = 1_000;
const DAY_MS: u64 = 24 * 3_600_000;
const REQUESTS_A_DAY: u64 = 100_000;
/// Requests that are admitted, and then settled, in one transaction.
const TOGETHER: u64 = 1_000;

/// Days of requests, one after the other, with the housekeeping of a node.
pub struct History {
    backend: Arc<EmbeddedBackend>,
    shared: Arc<StoreShared>,
    writer: Writer<EmbeddedBackend>,
    clock: TestClock,
    random: Random,
    requests: u64,
    accounts: u64,
}

impl History {
    /// The last of its days ends now.
    pub fn begin(folder: &Path, requests: u64, accounts: u64) -> Self {
        let config = EmbeddedConfig::new(folder);
        let backend =
            Arc::new(EmbeddedBackend::open_on(super::super::lock(&config).unwrap()).unwrap());
        let now = cresset_base::SystemClock.now().0;
        let clock = TestClock::at(now - requests.div_ceil(REQUESTS_A_DAY) * DAY_MS);
        let shown = Arc::new(clock.clone());
        let (shared, writer) = prepare(
            &backend,
            shown,
            Limits::default(),
            AuditPolicy::Always,
            &OpenProgress::default(),
        )
        .unwrap();
        Self { backend, shared, writer, clock, random: Random(1), requests, accounts }
    }

    pub fn go_on(mut self) {
        self.open_accounts();
        let mut done = 0;
        while done < self.requests {
            let together = TOGETHER.min(self.requests - done);
            self.serve(together);
            done += together;
            self.clock.set(self.clock.now().0 + DAY_MS * together / REQUESTS_A_DAY);
            if done % (REQUESTS_A_DAY / 4) == 0 {
                self.keep_house();
                println!("{done} requests");
            }
        }
        self.keep_house();
        self.writer.close();
    }

    fn commit(&mut self, actions: impl Iterator<Item = WriteAction>) {
        self.writer.commit(actions.map(|action| WriteJob::new(action, None)).collect());
        assert!(self.shared.health.reachable() && self.shared.health.trusted().is_ok());
    }

    fn open_accounts(&mut self) {
        let premium = Microcredits::new(1 << 50).unwrap();
        let commands = (1..=u128::from(self.accounts)).flat_map(|number| {
            let (name, plan) = (format!("account {number}"), "default".to_owned());
            let opening = BucketAmounts { premium, ..BucketAmounts::ZERO };
            [
                Command::CreateAccount { id: AccountId(id(number)), name, plan, opening },
                issue(number, number, None),
            ]
        });
        self.commit(commands.map(WriteAction::from));
    }

    fn serve(&mut self, requests: u64) {
        let boot = self.shared.boot();
        let new: Vec<_> = (0..requests)
            .map(|_| {
                let account = 1 + self.random.below(self.accounts as usize) as u128;
                let request = RequestId(Uuid::new_v4());
                let key =
                    RequestKey { account: AccountId(id(account)), application: None, request };
                let Command::Admit(mut admit) = admit(request.0.as_u128(), 0, boot, 200) else {
                    unreachable!()
                };
                admit.key = key;
                admit.attempt = AttemptId::generate();
                admit.credential = CredentialId(id(account));
                admit
            })
            .collect();
        self.commit(new.iter().map(|admit| Command::Admit(admit.clone()).into()));
        let expires_at = UnixMillis(self.clock.now().0 + DAY_MS);
        let usage = Usage { prompt_tokens: 100, cached_tokens: 0, completion_tokens: 100 };
        self.commit(new.iter().map(|admit| {
            let (key, attempt) = (admit.key, admit.attempt);
            let end = SettleEnd::Completed(FinishReason::Stop);
            let content = StoredContent::Plain(bytes::Bytes::from_static(&[b'a'; 800]));
            let body = StoredBody { expires_at, content, receipt: None };
            let command = Command::Settle { key, attempt, usage, end };
            WriteAction::new(command, Some((key, body)))
        }));
    }

    /// What the writer and the auditor of a node do each minute.
    fn keep_house(&mut self) {
        while self.writer.sweep().unwrap() {}
        let source = self.backend.audit_source().unwrap();
        assert!(self.shared.audit_news(&*source, &unpaced).unwrap().ok);
        drop(source);
        self.writer.seal().unwrap();
        while self.backend.close_journal_part(&unpaced).unwrap() {
            while self.writer.sweep().unwrap() {}
        }
    }
}

/// Returns the process's own high-water mark.
fn most_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
