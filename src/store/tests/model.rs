//! The same random commands against memory and redb, with restarts between: equal answers, equal books. And the codec.

use super::super::codec::{Field, seal, unseal};
use super::faults::Bench;
use super::media::SimulatedDisk;
use super::*;
use crate::ledger::apply::{ApplyError, apply};
use crate::ledger::memory::MemoryState;
use crate::ledger::records::EntryKind;
use crate::ledger::state::StateError;
use crate::ledger::{AccountStatus, Attempt, AttemptState, Balances, Entry, RequestRecord, Split};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Apply(Command),
    Pass { hours: u64 },
    Reopen,
}

/// Names come from small sets so that commands meet each other.
fn scope() -> impl Strategy<Value = (AccountId, Option<ApplicationId>)> {
    (1..=2_u128, prop_oneof![3 => Just(None), 1 => Just(Some(ApplicationId(id(1))))])
        .prop_map(|(account, application)| (AccountId(id(account)), application))
}

fn request() -> impl Strategy<Value = RequestKey> {
    (scope(), 1..=4_u128).prop_map(|((account, application), request)| RequestKey {
        account,
        application,
        request: RequestId(id(request)),
    })
}

fn attempt() -> impl Strategy<Value = AttemptId> {
    (1..=8_u128).prop_map(|number| AttemptId(id(number)))
}

fn units(most: u64) -> impl Strategy<Value = Units> {
    (0..=most).prop_map(|units| Units::new(units).unwrap())
}

fn admission() -> impl Strategy<Value = Command> {
    let numbers = (1..=3_u128, 0..=2_u8, 0..=20_u32, 0..=20_u32, 1..=3_u32);
    (request(), attempt(), numbers).prop_map(|(key, attempt, numbers)| {
        let (credential, input, prompt_tokens, max_output_tokens, max_concurrent) = numbers;
        Command::Admit(Box::new(Admit {
            key,
            credential: CredentialId(id(credential)),
            attempt,
            // Filled in when the command is given.
            boot: BootId(id(0)),
            fingerprint: [input; 32],
            session: SessionId(id(1)),
            model: ModelId(id(1)),
            stream: false,
            prompt_tokens,
            max_output_tokens,
            prices: Prices { revision: 1, input: 1_500_000, cached_input: 100_000, output: 2_000_000 },
            max_concurrent,
        }))
    })
}

fn ending() -> impl Strategy<Value = Command> {
    let usage = (0..=10_u32, 0..=10_u32, 0..=10_u32);
    (request(), attempt(), usage, 0..4).prop_map(|(key, attempt, usage, kind)| {
        let usage = Usage { prompt_tokens: usage.0, cached_tokens: usage.1.min(usage.0), completion_tokens: usage.2 };
        let (stopped, cancelled) = (SettleEnd::Completed(FinishReason::Stop), SettleEnd::Cancelled);
        let end = if kind == 0 { stopped } else { cancelled };
        let cause = if kind == 2 {
            ReleaseCause::CancelledInQueue
        } else {
            ReleaseCause::Failed(FailureCode::GenerationFailed)
        };
        match kind {
            0 | 1 => Command::Settle { key, attempt, usage, end },
            _ => Command::Release { key, attempt, cause },
        }
    })
}

fn command() -> impl Strategy<Value = Command> {
    let account = || (1..=2_u128).prop_map(|number| AccountId(id(number)));
    prop_oneof![
        10 => admission(),
        10 => ending(),
        3 => (request(), attempt()).prop_map(|(key, attempt)| Command::Start { key, attempt }),
        2 => request().prop_map(|key| Command::RequestCancel { key }),
        2 => (account(), units(60), 0..6_u8, any::<bool>()).prop_map(
            |(account, units, reference, trial)| Command::Grant {
                account,
                bucket: if trial { Bucket::Trial } else { Bucket::Premium },
                units,
                reference: reference.to_string(),
            }
        ),
        1 => (account(), any::<bool>()).prop_map(|(id, active)| Command::SetAccountStatus {
            id,
            status: if active { AccountStatus::Active } else { AccountStatus::Suspended },
        }),
        1 => (1..=3_u128).prop_map(|number| Command::RevokeCredential { id: CredentialId(id(number)) }),
        1 => (1..=4_u128, 1..=2_u128, proptest::option::of(Just(1_u128)))
            .prop_map(|(credential, account, application)| issue(credential, account, application)),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        30 => command().prop_map(Step::Apply),
        1 => (0..30_u64).prop_map(|hours| Step::Pass { hours }),
        1 => Just(Step::Reopen),
    ]
}

/// Both implementations, side by side.
struct Pair {
    memory: MemoryState,
    bench: Bench,
    clock: TestClock,
    now: u64,
}

impl Pair {
    fn new() -> Self {
        let clock = TestClock::at(1_000_000);
        let bench = Bench::open(&SimulatedDisk::formatted(), &clock).unwrap();
        let mut pair = Self { memory: MemoryState::default(), bench, clock, now: 1_000_000 };
        let create =
            |number| Command::CreateAccount { id: AccountId(id(number)), name: "name".into(), plan: "plan".into() };
        let application =
            Command::CreateApplication { id: ApplicationId(id(1)), account: AccountId(id(1)), name: "app".into() };
        let credentials = [issue(1, 1, None), issue(2, 1, Some(1)), issue(3, 2, None)];
        for command in [create(1), create(2), application].into_iter().chain(credentials) {
            pair.apply(command);
        }
        pair
    }

    fn take(mut self, step: Step) -> Self {
        match step {
            Step::Apply(command) => self.apply(command),
            Step::Pass { hours } => self.pass(hours * 3_600_000),
            Step::Reopen => {
                self.bench = self.bench.reopen();
                let boot = self.bench.shared.boot;
                let limit = usize::MAX - 1;
                apply(&mut self.memory, &Command::Recover { boot, limit }, UnixMillis(self.now)).unwrap();
            }
        }
        self
    }

    fn apply(&mut self, mut command: Command) {
        if let Command::Admit(admit) = &mut command {
            admit.boot = self.bench.shared.boot;
        }
        // A charge above the reservation is a violation, after which nothing is admitted; not what is compared here.
        let mut trial = self.memory.clone();
        let expect = apply(&mut trial, &command, UnixMillis(self.now));
        if matches!(expect, Err(ApplyError::Violated(_))) {
            return;
        }
        self.memory = trial;
        let answer = self.bench.apply(vec![command.clone()]).remove(0).unwrap();
        let answer = answer.map_err(|error| error.to_string());
        let expect = expect.map_err(|error| error.to_string());
        assert_eq!(format!("{answer:?}"), format!("{expect:?}"), "{command:?}");
    }

    fn pass(&mut self, milliseconds: u64) {
        self.now += milliseconds;
        self.clock.set(self.now);
        self.bench.sweep();
        let replay = 24 * 3_600_000;
        let is_old = |record: &RequestRecord| {
            let at = record.latest().finished_at;
            at.is_some_and(|at| at.0 + replay <= self.now)
        };
        let old: Vec<_> = self.memory.requests.values().filter(|record| is_old(record)).cloned().collect();
        for record in old {
            self.memory.requests.remove(&record.key);
            self.memory.archived.insert(record.key, record);
        }
    }

    fn compare(&self) {
        assert_eq!(self.memory.audit(), Vec::<String>::new());
        let snapshot = self.bench.shared.snapshot().unwrap();
        assert_eq!(super::super::check::audit(&snapshot).unwrap().violations, Vec::<String>::new());
        for account in self.memory.accounts.values() {
            assert_eq!(snapshot.account(account.id).unwrap().as_ref(), Some(account));
            let mut entries = snapshot.entries(account.id).unwrap();
            // Boots differ from run to run, but no entry names one.
            entries.retain(|entry| !self.memory.entries.contains(entry));
            assert_eq!(entries, []);
        }
        let requests = self.memory.requests.values().chain(self.memory.archived.values());
        for record in requests {
            assert_eq!(snapshot.request(&record.key).unwrap().as_ref(), Some(record));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn memory_and_disk_agree(steps in proptest::collection::vec(step(), 1..80)) {
        let pair = steps.into_iter().fold(Pair::new(), Pair::take);
        pair.compare();
    }
}

fn split() -> impl Strategy<Value = Split> {
    (units(Units::MAX.get()), units(Units::MAX.get())).prop_map(|(trial, premium)| Split { trial, premium })
}

fn balances() -> impl Strategy<Value = Balances> {
    (split(), split(), split()).prop_map(|(credited, debited, reserved)| {
        let bucket = |part: fn(&Split) -> Units| crate::ledger::Balance {
            credited: part(&credited),
            debited: part(&debited),
            reserved: part(&reserved),
        };
        Balances { trial: bucket(|split| split.trial), premium: bucket(|split| split.premium) }
    })
}

fn stored_attempt() -> impl Strategy<Value = Attempt> {
    let options = (any::<Option<u64>>(), any::<Option<u64>>(), any::<Option<[u32; 3]>>());
    let states = prop_oneof![
        Just(AttemptState::Queued),
        Just(AttemptState::Running),
        Just(AttemptState::Completed),
        Just(AttemptState::Cancelled),
        Just(AttemptState::Failed),
    ];
    (any::<[u128; 4]>(), any::<[u64; 4]>(), split(), split(), options, states).prop_map(
        |(ids, numbers, reserved, charged, (started, finished, usage), state)| Attempt {
            id: AttemptId(id(ids[0])),
            number: numbers[0] as u32,
            retry_of: (numbers[1] % 2 == 0).then(|| AttemptId(id(ids[1]))),
            credential: CredentialId(id(ids[2])),
            boot: BootId(id(ids[3])),
            state,
            failure: (numbers[2] % 2 == 0).then_some(FailureCode::DeadlineExceeded),
            finish_reason: (numbers[2] % 3 == 0).then_some(FinishReason::Length),
            cancel_requested: numbers[3] % 2 == 0,
            prices: Prices {
                revision: numbers[0] as u32,
                input: numbers[1],
                cached_input: numbers[2],
                output: numbers[3],
            },
            reserved,
            charged,
            usage: usage.map(|[prompt_tokens, cached_tokens, completion_tokens]| Usage {
                prompt_tokens,
                cached_tokens,
                completion_tokens,
            }),
            created_at: UnixMillis(numbers[0]),
            started_at: started.map(UnixMillis),
            finished_at: finished.map(UnixMillis),
        },
    )
}

pub(super) fn record() -> impl Strategy<Value = RequestRecord> {
    let attempts = proptest::collection::vec(stored_attempt(), 1..4);
    (request(), any::<[u8; 32]>(), any::<[u128; 2]>(), any::<bool>(), attempts).prop_map(
        |(key, fingerprint, ids, stream, attempts)| RequestRecord {
            key,
            fingerprint,
            session: SessionId(id(ids[0])),
            model: ModelId(id(ids[1])),
            stream,
            attempts,
        },
    )
}

pub(super) fn entry() -> impl Strategy<Value = Entry> {
    let kind = prop_oneof![
        any::<String>().prop_map(|reference| EntryKind::Grant { reference }),
        (request(), attempt()).prop_map(|(key, attempt)| EntryKind::Reserve { key, attempt }),
        (request(), attempt()).prop_map(|(key, attempt)| EntryKind::Settle { key, attempt }),
        (request(), attempt()).prop_map(|(key, attempt)| EntryKind::Release { key, attempt }),
    ];
    (any::<[u64; 2]>(), any::<u128>(), kind, split(), balances(), any::<[u8; 16]>()).prop_map(
        |([sequence, at], account, kind, amount, after, hash)| Entry {
            sequence,
            at: UnixMillis(at),
            account: AccountId(id(account)),
            kind,
            amount,
            after,
            hash,
        },
    )
}

fn round_trip<T: Field + PartialEq + std::fmt::Debug>(row: &T) {
    let stored = seal(b"key", row);
    assert_eq!(unseal::<T>(b"key", &stored).as_ref(), Ok(row));
    let elsewhere = unseal::<T>(b"yek", &stored);
    assert!(matches!(elsewhere, Err(StateError::Corrupt(_))));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rows_survive_their_layout(record in record(), entry in entry(), balances in balances()) {
        round_trip(&record);
        round_trip(&entry);
        round_trip(&balances);
    }

    #[test]
    fn a_damaged_row_is_never_read(
        record in record(), place in any::<proptest::sample::Index>(), flip in 1..=255_u8,
    ) {
        let mut stored = seal(b"key", &record);
        let place = place.index(stored.len());
        stored[place] ^= flip;
        assert!(unseal::<RequestRecord>(b"key", &stored).is_err());
        assert!(unseal::<RequestRecord>(b"key", &stored[..place]).is_err());
    }

    #[test]
    fn junk_is_never_a_row(junk in proptest::collection::vec(any::<u8>(), 0..300)) {
        assert!(unseal::<RequestRecord>(b"key", &junk).is_err());
        let mut sealed = junk.clone();
        let crc = crc32c::crc32c_append(crc32c::crc32c(b"key"), &sealed);
        sealed.extend(crc.to_be_bytes());
        // Even under a right checksum: an error or a row, never a panic.
        drop(unseal::<RequestRecord>(b"key", &sealed));
        drop(unseal::<Entry>(b"key", &sealed));
    }
}
