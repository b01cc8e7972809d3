//! Random commands, with which backends are compared with memory. Names come from small sets, so
//! that commands often concern the same rows.

use super::*;
use cresset_ledger::AccountStatus;
use cresset_ledger::AdmissionRate;
use proptest::prelude::*;

/// A day, as the default limits have it.
pub const CRASH_BLOCK_MS: u64 = 24 * 3_600_000;
pub const REPLAY_MS: u64 = 24 * 3_600_000;

fn scope() -> impl Strategy<Value = (AccountId, Option<ApplicationId>)> {
    (1..=2_u128, prop_oneof![3 => Just(None), 1 => Just(Some(ApplicationId(id(1))))])
        .prop_map(|(account, application)| (AccountId(id(account)), application))
}

pub fn request() -> impl Strategy<Value = RequestKey> {
    (scope(), 1..=4_u128).prop_map(|((account, application), request)| RequestKey {
        account,
        application,
        request: RequestId(id(request)),
    })
}

pub fn attempt() -> impl Strategy<Value = AttemptId> {
    (1..=8_u128).prop_map(|number| AttemptId(id(number)))
}

pub fn units(most: u64) -> impl Strategy<Value = Microcredits> {
    (0..=most).prop_map(|units| Microcredits::new(units).unwrap())
}

fn admission() -> impl Strategy<Value = Command> {
    let numbers = (1..=3_u128, 0..=2_u8, 0..=20_u32, 0..=20_u32, 1..=3_u32);
    let quota = || proptest::option::weighted(0.3, 0..200_u64);
    (request(), attempt(), numbers, quota(), quota()).prop_map(
        |(key, attempt, numbers, day, month)| {
            let (credential, input, prompt_tokens, max_output_tokens, max_concurrent) = numbers;
            Command::Admit(Box::new(Admit {
                key,
                credential: CredentialId(id(credential)),
                attempt,
                // Filled in when the command is sent.
                boot: BootId(id(0)),
                fingerprint: [input; 32],
                session: SessionId(id(1)),
                model: ModelId(id(1)),
                stream: false,
                prompt_tokens,
                max_output_tokens,
                prices: Prices {
                    revision: 1,
                    input: 1_500_000,
                    cached_input: 100_000,
                    output: 2_000_000,
                },
                max_concurrent,
                quotas: TokenQuotas { day, month },
                rate: AdmissionRate::default(),
                retention_ms: REPLAY_MS,
                crash_block_ms: CRASH_BLOCK_MS,
            }))
        },
    )
}

fn ending() -> impl Strategy<Value = Command> {
    let usage = (0..=10_u32, 0..=10_u32, 0..=10_u32);
    (request(), attempt(), usage, 0..5).prop_map(|(key, attempt, usage, kind)| {
        let usage = Usage {
            prompt_tokens: usage.0,
            cached_tokens: usage.1.min(usage.0),
            completion_tokens: usage.2,
        };
        let end = match kind {
            0 => SettleEnd::Completed(FinishReason::Stop),
            1 => SettleEnd::Cancelled,
            _ => SettleEnd::FormatTooCostly,
        };
        let cause = if kind == 3 {
            ReleaseCause::CancelledInQueue
        } else {
            ReleaseCause::Failed(FailureCode::GenerationFailed)
        };
        match kind {
            0..=2 => Command::Settle { key, attempt, usage, end },
            _ => Command::Release { key, attempt, cause },
        }
    })
}

pub fn command() -> impl Strategy<Value = Command> {
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
        2 => (account(), units(20), 0..9_u8, any::<bool>()).prop_map(
            |(account, units, reference, trial)| Command::Debit {
                account,
                bucket: if trial { Bucket::Trial } else { Bucket::Premium },
                units,
                reference: reference.to_string(),
            }
        ),
        1 => (account(), any::<bool>()).prop_map(|(id, other)| Command::ChangeAccount {
            id,
            change: AccountChange {
                name: Some(if other { "other" } else { "one" }.into()),
                note: Some(if other { "a note" } else { "" }.into()),
                stores_answers: Some(other),
                ..AccountChange::default()
            },
        }),
        2 => budget(),
        1 => (1..=3_u128, 0..9_000_u64).prop_map(|(number, at)| Command::ExpireCredential {
            id: CredentialId(id(number)),
            at: UnixMillis(u64::MAX - at),
        }),
        1 => (account(), any::<bool>()).prop_map(|(id, active)| Command::SetAccountStatus {
            id,
            status: if active { AccountStatus::Active } else { AccountStatus::Suspended },
        }),
        1 => (1..=3_u128).prop_map(|number| Command::RevokeCredential { id: CredentialId(id(number)) }),
        1 => (1..=4_u128, 1..=2_u128, proptest::option::of(Just(1_u128)))
            .prop_map(|(credential, account, application)| issue(credential, account, application)),
    ]
}

fn budget() -> impl Strategy<Value = Command> {
    let owner = prop_oneof![
        (1..=2_u128).prop_map(|number| BudgetOwner::Account(AccountId(id(number)))),
        (1..=3_u128).prop_map(|number| BudgetOwner::Key(CredentialId(id(number)))),
    ];
    let limit = (units(150), proptest::option::of(1..=100_u8));
    (owner, any::<bool>(), proptest::option::weighted(0.7, limit)).prop_map(
        |(owner, monthly, limit)| Command::SetBudget {
            owner,
            period: if monthly { BudgetPeriod::Month } else { BudgetPeriod::Day },
            limit: limit.map(|(units, alert_percent)| SpendingLimit { units, alert_percent }),
        },
    )
}
