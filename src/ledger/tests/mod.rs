//! The rules as text: each line is a command and its expected answer; after each line the audit
//! must find nothing.
//!
//! Names stand for ids. Prompt and output tokens cost one unit each, cached ones nothing, so
//! amounts can be read off.

mod planted;
mod rules;
mod stepped_clock;

use crate::amounts::{BucketAmounts, Microcredits, Prices, Usage};
use crate::apply::{ApplyError, apply};
use crate::budgets::{BudgetOwner, BudgetPeriod, Budgets, CalendarUse, SpendingLimit, TokenQuotas};
use crate::commands::{AccountChange, Admit, Command, Outcome, ReleaseCause, SettleEnd};
use crate::records::{
    AccountStatus, Attempt, AttemptState, Bucket, Credential, CredentialKind, FailureCode,
    FinishReason, RequestKey, RequestRecord,
};
use crate::state::LedgerState;
use crate::testing::MemoryState;
use crate::{AdmissionRate, Refusal};
use cresset_base::{
    AccountId, ApplicationId, AttemptId, BootId, CredentialId, ModelId, RequestId, SessionId,
    UnixMillis,
};
use uuid::Uuid;

fn uuid(name: &str) -> Uuid {
    let mut bytes = [0; 16];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    Uuid::from_bytes(bytes)
}

fn units(amount: &str) -> Microcredits {
    Microcredits::new(amount.parse().unwrap()).unwrap()
}

/// The fingerprint of an input of this name.
fn fingerprint(input: &str) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..input.len()].copy_from_slice(input.as_bytes());
    bytes
}

/// How long a crash counts, milliseconds.
const CRASH_BLOCK_MS: u64 = 1_000;

/// `a` is account a's own scope, `a/x` that of its application x.
fn key(scope: &str, request: &str) -> RequestKey {
    let (account, application) = match scope.split_once('/') {
        Some((account, application)) => (account, Some(ApplicationId(uuid(application)))),
        None => (scope, None),
    };
    RequestKey { account: AccountId(uuid(account)), application, request: RequestId(uuid(request)) }
}

struct World {
    state: MemoryState,
    now: UnixMillis,
    boot: BootId,
    prices: Prices,
    quotas: TokenQuotas,
}

impl World {
    fn new() -> Self {
        let prices = Prices { revision: 1, input: 1_000_000, cached_input: 0, output: 1_000_000 };
        Self {
            state: MemoryState::default(),
            now: UnixMillis(1_000),
            boot: BootId(uuid("boot1")),
            prices,
            quotas: TokenQuotas::default(),
        }
    }

    fn run(&mut self, line: &str) -> String {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["at", time] => {
                let now = UnixMillis(time.parse().unwrap());
                if now < self.now {
                    self.state.set_time_back();
                }
                self.now = now;
                "ok".into()
            }
            ["boot", name] => {
                self.boot = BootId(uuid(name));
                "ok".into()
            }
            ["prices", revision, input, cached, output] => {
                let millions = |units: &str| units.parse::<u64>().unwrap() * 1_000_000;
                let (input, cached_input, output) =
                    (millions(input), millions(cached), millions(output));
                self.prices =
                    Prices { revision: revision.parse().unwrap(), input, cached_input, output };
                "ok".into()
            }
            ["quotas", day, month] => {
                let [day, month] = [day, month].map(|tokens| tokens.parse().ok());
                self.quotas = TokenQuotas { day, month };
                "ok".into()
            }
            ["archive", scope, request] => {
                let record = self.state.requests.remove(&key(scope, request)).unwrap();
                self.state.archived.insert(record.key, record);
                "ok".into()
            }
            ["balance", account] => self.balance(AccountId(uuid(account))),
            words => self.apply(&self.command(words)),
        }
    }

    fn apply(&mut self, command: &Command) -> String {
        let before = self.state.clone();
        let outcome = apply(&mut self.state, command, self.now);
        if outcome.is_err() {
            assert_eq!(self.state.entries, before.entries, "a refusal wrote something");
            assert_eq!(self.state.requests, before.requests, "a refusal wrote something");
        }
        describe(&outcome)
    }

    fn balance(&self, id: AccountId) -> String {
        let balances = self.state.balances(id).unwrap();
        let bucket = |bucket: super::Balance| {
            format!("{}-{}-{}", bucket.credited, bucket.debited, bucket.reserved)
        };
        let in_flight = self.state.accounts[&id].in_flight;
        format!("{} {} in flight {in_flight}", bucket(balances.trial), bucket(balances.premium))
    }

    fn command(&self, words: &[&str]) -> Command {
        match *words {
            ["account", id] => self.command(&["account", id, "basic"]),
            ["account", id, plan] => self.command(&["account", id, plan, "0", "0"]),
            ["account", id, plan, trial, premium] => Command::CreateAccount {
                id: AccountId(uuid(id)),
                name: id.into(),
                plan: plan.into(),
                opening: BucketAmounts { trial: units(trial), premium: units(premium) },
            },
            ["suspend", id] => Command::SetAccountStatus {
                id: AccountId(uuid(id)),
                status: AccountStatus::Suspended,
            },
            ["app", id, account] => Command::CreateApplication {
                id: ApplicationId(uuid(id)),
                account: AccountId(uuid(account)),
                name: id.into(),
            },
            ["key", id, account] => self.credential(id, account, None),
            ["key", id, account, expires] => self.credential(id, account, expires.parse().ok()),
            ["revoke", id] => Command::RevokeCredential { id: CredentialId(uuid(id)) },
            ["grant", account, bucket, amount, reference] => Command::Grant {
                account: AccountId(uuid(account)),
                bucket: if bucket == "trial" { Bucket::Trial } else { Bucket::Premium },
                units: units(amount),
                reference: reference.into(),
            },
            ["debit", account, bucket, amount, reference] => Command::Debit {
                account: AccountId(uuid(account)),
                bucket: if bucket == "trial" { Bucket::Trial } else { Bucket::Premium },
                units: units(amount),
                reference: reference.into(),
            },
            ["change", id, name, plan] => Command::ChangeAccount {
                id: AccountId(uuid(id)),
                change: AccountChange {
                    name: (name != "-").then(|| name.into()),
                    plan: (plan != "-").then(|| plan.into()),
                    ..AccountChange::default()
                },
            },
            ["budget", owner, id, period, amount] => {
                self.command(&["budget", owner, id, period, amount, ""])
            }
            ["budget", owner, id, period, amount, percent] => Command::SetBudget {
                owner: match owner {
                    "key" => BudgetOwner::Key(CredentialId(uuid(id))),
                    _ => BudgetOwner::Account(AccountId(uuid(id))),
                },
                period: if period == "day" { BudgetPeriod::Day } else { BudgetPeriod::Month },
                limit: (amount != "none").then(|| SpendingLimit {
                    units: units(amount),
                    alert_percent: percent.parse().ok(),
                }),
            },
            ["expire", id, at] => Command::ExpireCredential {
                id: CredentialId(uuid(id)),
                at: UnixMillis(at.parse().unwrap()),
            },
            _ => self.request_command(words),
        }
    }

    fn request_command(&self, words: &[&str]) -> Command {
        match *words {
            ["admit", scope, request, attempt, credential, prompt, output] => {
                self.admit([scope, request, attempt, credential, prompt, output], "input", 8)
            }
            ["admit", scope, request, attempt, credential, prompt, output, input] => {
                self.admit([scope, request, attempt, credential, prompt, output], input, 8)
            }
            ["admit", scope, request, attempt, credential, prompt, output, input, limit] => {
                let limit = limit.parse().unwrap();
                self.admit([scope, request, attempt, credential, prompt, output], input, limit)
            }
            ["start", scope, request, attempt] => {
                Command::Start { key: key(scope, request), attempt: AttemptId(uuid(attempt)) }
            }
            ["settle", scope, request, attempt, prompt, cached, output, end] => Command::Settle {
                key: key(scope, request),
                attempt: AttemptId(uuid(attempt)),
                usage: Usage {
                    prompt_tokens: prompt.parse().unwrap(),
                    cached_tokens: cached.parse().unwrap(),
                    completion_tokens: output.parse().unwrap(),
                },
                end: match end {
                    "stop" => SettleEnd::Completed(FinishReason::Stop),
                    "length" => SettleEnd::Completed(FinishReason::Length),
                    "costly" => SettleEnd::FormatTooCostly,
                    _ => SettleEnd::Cancelled,
                },
            },
            ["release", scope, request, attempt, cause] => Command::Release {
                key: key(scope, request),
                attempt: AttemptId(uuid(attempt)),
                cause: match cause {
                    "queued" => ReleaseCause::CancelledInQueue,
                    "away" => ReleaseCause::TurnedAway(FailureCode::Overloaded),
                    "overloaded" => ReleaseCause::Failed(FailureCode::Overloaded),
                    "draining" => ReleaseCause::Failed(FailureCode::Draining),
                    "unreachable" => ReleaseCause::Failed(FailureCode::ControlPlaneUnavailable),
                    _ => ReleaseCause::Failed(FailureCode::GenerationFailed),
                },
            },
            ["cancel", scope, request] => Command::RequestCancel { key: key(scope, request) },
            ["recover", limit] => {
                let (boot, limit) = (self.boot, limit.parse().unwrap());
                Command::Recover { boot, limit, crash_block_ms: CRASH_BLOCK_MS }
            }
            ["take-back", account, input, boot] => Command::TakeBackCrash {
                account: AccountId(uuid(account)),
                fingerprint: fingerprint(input),
                boot: BootId(uuid(boot)),
            },
            ["unblock", account, input] => Command::ForgetCrashes {
                account: AccountId(uuid(account)),
                fingerprint: fingerprint(input),
            },
            ref other => panic!("no such line: {other:?}"),
        }
    }

    fn credential(&self, id: &str, scope: &str, expires: Option<u64>) -> Command {
        let RequestKey { account, application, .. } = key(scope, "");
        let kind = match application {
            Some(_) => CredentialKind::AccessToken,
            None => CredentialKind::ApiKey,
        };
        let mut digest = [0; 32];
        digest[..id.len()].copy_from_slice(id.as_bytes());
        let credential = Credential {
            id: CredentialId(uuid(id)),
            kind,
            account,
            application,
            label: None,
            digest,
            hint: "hint".into(),
            created_at: self.now,
            expires_at: expires.map(UnixMillis),
            revoked_at: None,
            budgets: Budgets::default(),
            used: CalendarUse::default(),
        };
        Command::IssueCredential { credential }
    }

    fn admit(&self, words: [&str; 6], input: &str, max_concurrent: u32) -> Command {
        let [scope, request, attempt, credential, prompt, output] = words;
        Command::Admit(Box::new(Admit {
            key: key(scope, request),
            credential: CredentialId(uuid(credential)),
            attempt: AttemptId(uuid(attempt)),
            boot: self.boot,
            fingerprint: fingerprint(input),
            session: SessionId(uuid("session")),
            model: ModelId(uuid("model")),
            stream: false,
            prompt_tokens: prompt.parse().unwrap(),
            max_output_tokens: output.parse().unwrap(),
            prices: self.prices,
            max_concurrent,
            quotas: self.quotas,
            rate: AdmissionRate::default(),
            retention_ms: u64::MAX,
            crash_block_ms: CRASH_BLOCK_MS,
        }))
    }
}

fn describe(outcome: &Result<Outcome, ApplyError>) -> String {
    match outcome {
        Ok(Outcome::Done) => "done".into(),
        Ok(Outcome::Repeated) => "repeated".into(),
        Ok(Outcome::Admitted(record)) => format!("admitted {}", show(record)),
        Ok(Outcome::Existing(record)) => format!("existing {}", show(record)),
        Ok(Outcome::Request(record)) => show(record),
        Ok(Outcome::Settled { record, alerts }) => {
            let told = |alert: &crate::BudgetAlert| {
                format!(", {} {}", alert.owner.kind(), alert.period.name())
            };
            show(record) + &alerts.iter().map(told).collect::<String>()
        }
        Ok(Outcome::AlreadyResolved(record)) => format!("already {}", show(record)),
        Ok(Outcome::Recovered { released, remaining }) => {
            format!("released {released}{}", if *remaining { " of more" } else { "" })
        }
        Err(ApplyError::Refused(refusal)) => format!("refused {}", shown(*refusal)),
        Err(ApplyError::Violated(violation)) => format!("violated {}", violation.rule),
        Err(ApplyError::State(error)) => error.to_string(),
    }
}

/// `#attempt state`, then what is reserved (trial+premium) while it is live, or charged once it has
/// ended.
fn show(record: &RequestRecord) -> String {
    let Attempt { number, state, reserved, charged, .. } = *record.latest();
    let amount = if state.is_terminal() { charged } else { reserved };
    let flag = if record.latest().cancel_requested { " cancelling" } else { "" };
    let state = match state {
        AttemptState::Queued => "queued",
        AttemptState::Running => "running",
        AttemptState::Completed => "completed",
        AttemptState::Cancelled => "cancelled",
        AttemptState::Failed => "failed",
    };
    format!("#{number} {state} {}+{}{flag}", amount.trial, amount.premium)
}

/// Runs `script` after an account `a` with key `k` and 100 units in either bucket, over a journal
/// that is one chain and over one with a chain for each account.
fn check(script: &str) {
    check_over(World::new(), script);
    let mut world = World::new();
    world.state.chain_per_account = true;
    check_over(world, script);
}

fn check_over(mut world: World, script: &str) {
    for line in ["account a", "key k a", "grant a trial 100 t", "grant a premium 100 p"] {
        assert_eq!(world.run(line), "done", "{line}");
    }
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (command, expect) = line.split_once("->").unwrap();
        assert_eq!(world.run(command), expect.trim(), "{line}");
        assert_eq!(world.state.audit(), Vec::<String>::new(), "after {line}");
    }
}

/// The refusal with the figures that it holds, in the order of their names in the code.
fn shown(refusal: Refusal) -> String {
    match refusal {
        Refusal::ConcurrencyLimit { limit } => format!("ConcurrencyLimit {limit}"),
        Refusal::InsufficientCredits { needed, available } => {
            format!("InsufficientCredits {needed} {available}")
        }
        Refusal::CreditsReserved { needed, available } => {
            format!("CreditsReserved {needed} {available}")
        }
        Refusal::LimitReached(limit) => {
            let (kind, period) = (limit.kind.name(), limit.period.name());
            let figures = [limit.allowed, limit.spent, limit.reserved, limit.needed];
            let wait = if limit.fits_once_settled() {
                "soon".into()
            } else {
                limit.renews_at.0.to_string()
            };
            format!("{kind} {period} {figures:?} {wait}")
        }
        other => format!("{other:?}"),
    }
}
