//! Documents about requests and money that clients, operators and receipts show in the same form.
//! Times are Unix seconds, amounts integer strings.

pub(crate) mod receipt;

use cresset_base::{AttemptId, ModelId, RequestId, SessionId, UnixMillis};
use cresset_ledger::{
    Attempt, AttemptState, Balances, BucketAmounts, FailureCode, Microcredits, RequestRecord, Usage,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Debug, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CreditBalance {
    #[schemars(extend("const" = "credit_balance"))]
    object: &'static str,
    #[schemars(extend("const" = "microcredit"))]
    unit: &'static str,
    #[schemars(extend("const" = "1000000"))]
    units_per_credit: &'static str,
    trial_units: Microcredits,
    premium_units: Microcredits,
    processing_eligible_units: Microcredits,
    purchase_eligible_units: Microcredits,
    reserved_units: Microcredits,
}

impl CreditBalance {
    /// `None` when the balances contradict themselves.
    pub fn of(balances: &Balances) -> Option<Self> {
        let trial = balances.trial.credited.checked_sub(balances.trial.debited)?;
        let premium = balances.premium.credited.checked_sub(balances.premium.debited)?;
        let reserved = balances.trial.reserved.checked_add(balances.premium.reserved)?;
        Some(Self {
            object: "credit_balance",
            unit: "microcredit",
            units_per_credit: "1000000",
            trial_units: trial,
            premium_units: premium,
            processing_eligible_units: trial.checked_add(premium)?.checked_sub(reserved)?,
            purchase_eligible_units: premium.checked_sub(balances.premium.reserved)?,
            reserved_units: reserved,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Usage")]
pub struct UsageObject {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    pub total_tokens: u32,
    pub prompt_tokens_details: PromptTokensDetails,
    /// Absent of a model that does not think.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CompletionTokensDetails {
    /// Tokens of the thought with its marks: a part of `completion_tokens`.
    pub reasoning_tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PromptTokensDetails {
    pub cached_tokens: u32,
}

impl From<Usage> for UsageObject {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens.saturating_add(usage.completion_tokens),
            prompt_tokens_details: PromptTokensDetails { cached_tokens: usage.cached_tokens },
            completion_tokens_details: None,
        }
    }
}

impl UsageObject {
    pub fn of(usage: Usage, reasoning_tokens: Option<u32>) -> Self {
        let details = |reasoning_tokens| CompletionTokensDetails { reasoning_tokens };
        Self { completion_tokens_details: reasoning_tokens.map(details), ..usage.into() }
    }
}

/// A request as its owner may see it.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Request")]
pub struct RequestObject {
    pub id: RequestId,
    #[schemars(extend("const" = "request"))]
    object: &'static str,
    session_id: SessionId,
    model: ModelId,
    pub state: AttemptState,
    attempt_id: AttemptId,
    attempt_count: u32,
    retry_of: Option<AttemptId>,
    failure_code: Option<FailureCode>,
    pub cancel_requested: bool,
    cancellable: bool,
    created_at: u64,
    started_at: Option<u64>,
    finished_at: Option<u64>,
    usage: Option<UsageObject>,
    /// What the latest attempt holds now: nothing any more once it has ended.
    #[serde(rename = "reservedUnits")]
    reserved_units: Microcredits,
    #[serde(rename = "chargedUnits")]
    charged_units: Microcredits,
}

impl RequestObject {
    pub fn of(record: &RequestRecord) -> Self {
        let attempt: &Attempt = record.latest();
        let live = !attempt.state.is_terminal();
        Self {
            id: record.key.request,
            object: "request",
            session_id: record.session,
            model: record.model,
            state: attempt.state,
            attempt_id: attempt.id,
            attempt_count: attempt.number,
            retry_of: attempt.retry_of,
            failure_code: attempt.failure,
            cancel_requested: attempt.cancel_requested,
            cancellable: live,
            created_at: attempt.created_at.seconds(),
            started_at: attempt.started_at.map(UnixMillis::seconds),
            finished_at: attempt.finished_at.map(UnixMillis::seconds),
            usage: attempt.usage.map(UsageObject::from),
            reserved_units: if live { total(attempt.reserved) } else { Microcredits::default() },
            charged_units: total(attempt.charged),
        }
    }
}

fn total(amounts: BucketAmounts) -> Microcredits {
    amounts.trial.checked_add(amounts.premium).unwrap_or(Microcredits::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_ledger::Balance;

    fn balance(credited: u64, debited: u64, reserved: u64) -> Balance {
        let units = |n| Microcredits::new(n).unwrap();
        Balance { credited: units(credited), debited: units(debited), reserved: units(reserved) }
    }

    #[test]
    fn eligible_amounts_exclude_reservations() {
        let check = |trial: Balance, premium: Balance, expect: Option<[u64; 5]>| {
            let object = CreditBalance::of(&Balances { trial, premium });
            let seen = object.map(|b| {
                let all = [b.trial_units, b.premium_units, b.processing_eligible_units];
                let more = [b.purchase_eligible_units, b.reserved_units];
                [all[0].get(), all[1].get(), all[2].get(), more[0].get(), more[1].get()]
            });
            assert_eq!(seen, expect);
        };
        check(balance(0, 0, 0), balance(0, 0, 0), Some([0, 0, 0, 0, 0]));
        check(balance(100, 40, 60), balance(500, 0, 30), Some([60, 500, 470, 470, 90]));
        check(balance(1, 2, 0), balance(0, 0, 0), None);
    }
}
