//! The objects that clients read: the account, its balances, models, requests. Times are Unix
//! seconds, amounts integer strings.

use super::completion::UsageObject;
use super::query::Page;
use super::schemas::UpstreamSchema;
use cresset_base::clock::UnixMillis;
use cresset_base::ids::{
    AccountId, ApplicationId, AttemptId, CredentialId, ModelId, RequestId, SessionId,
};
use cresset_catalogue::{Evidence, Upstream};
use cresset_ledger::{
    Account, AccountStatus, Attempt, AttemptState, Balances, BucketAmounts, Credential,
    CredentialKind, FailureCode, Microcredits, RequestRecord,
};
use cresset_pool::ServedModel;
use cresset_request::Plan;
use cresset_request::{Capability, TokenLimits};
use schemars::JsonSchema;
use serde::Serialize;
use uuid::Uuid;

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Account")]
pub struct Me {
    #[schemars(extend("const" = "account"))]
    object: &'static str,
    id: AccountId,
    status: AccountStatus,
    plan: String,
    credential: CredentialObject,
    application_connection_id: Option<ApplicationId>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Credential")]
struct CredentialObject {
    id: CredentialId,
    kind: CredentialKind,
    expires_at: Option<u64>,
}

impl Me {
    pub fn of(account: &Account, credential: &Credential) -> Self {
        let Credential { id, kind, expires_at, application, .. } = *credential;
        Self {
            object: "account",
            id: account.id,
            status: account.status,
            plan: account.plan.clone(),
            credential: CredentialObject {
                id,
                kind,
                expires_at: expires_at.map(UnixMillis::seconds),
            },
            application_connection_id: application,
        }
    }
}

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

#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "Model")]
pub struct ModelObject {
    pub id: ModelId,
    #[schemars(extend("const" = "model"))]
    object: &'static str,
    created: u64,
    owned_by: String,
    address: Option<String>,
    publisher: String,
    #[schemars(with = "UpstreamSchema")]
    upstream: Upstream,
    release_id: Uuid,
    release_label: String,
    #[schemars(extend("const" = "text_generation"))]
    task: &'static str,
    #[schemars(extend("const" = ["text"]))]
    input_modalities: [&'static str; 1],
    #[schemars(extend("const" = ["text"]))]
    output_modalities: [&'static str; 1],
    limits: ModelLimits,
    pricing: Pricing,
    evidence: EvidenceObject,
    /// What requests may ask of the model beyond text. `json_schema`: answers that keep to a
    /// format. `tools`: calls of tools. `reasoning`: what the model thinks is told apart.
    #[schemars(extend("items" = { "enum": ["json_schema", "tools", "reasoning"] }))]
    capabilities: Vec<&'static str>,
    /// Who says who made the model: a release that is published with the node, or its file alone.
    attribution: Attribution,
}

#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Attribution {
    Published,
    ClaimedByFile,
}

/// What the model's qualification rests on.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "Evidence")]
struct EvidenceObject {
    /// What its outputs were compared with: its own reference, that of a sister release, none.
    #[schemars(extend("enum" = ["reference", "like", "self"]))]
    grade: &'static str,
    /// The sister release.
    like: Option<String>,
    /// The id of the signed record.
    record: String,
    suite: String,
    qualified_at: u64,
    /// The node's public key: hex SHA-256 of its bytes.
    key: String,
}

impl EvidenceObject {
    fn of(evidence: &Evidence) -> Self {
        let Evidence { grade, like, record, suite, qualified_at, key, .. } = evidence.clone();
        Self { grade: grade.name(), like, record, suite, qualified_at, key }
    }
}

/// Tokens.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[expect(clippy::struct_field_names, reason = "the public interface has these names")]
struct ModelLimits {
    model_context_tokens: u32,
    qualified_context_tokens: u32,
    plan_context_tokens: u32,
    /// The lowest of the three.
    context_tokens: u32,
    max_output_tokens: u32,
}

/// Microcredits per million tokens.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
struct Pricing {
    #[serde(rename = "inputUnitsPerMillion")]
    input: Microcredits,
    #[serde(rename = "cachedInputUnitsPerMillion")]
    cached_input: Microcredits,
    #[serde(rename = "outputUnitsPerMillion")]
    output: Microcredits,
}

impl ModelObject {
    pub fn of(model: &ServedModel, plan: &Plan) -> Self {
        let manifest = model.qualified.manifest();
        let units = |price| Microcredits::new(price).unwrap_or(Microcredits::MAX);
        Self {
            id: manifest.id,
            object: "model",
            created: manifest.created,
            owned_by: manifest.publisher.clone(),
            address: manifest.address.clone(),
            publisher: manifest.publisher.clone(),
            upstream: manifest.upstream.clone(),
            release_id: manifest.release_id,
            release_label: manifest.release_label.clone(),
            task: "text_generation",
            input_modalities: ["text"],
            output_modalities: ["text"],
            limits: TokenLimits::of(model, plan).into(),
            pricing: Pricing {
                input: units(manifest.prices.input),
                cached_input: units(manifest.prices.cached_input),
                output: units(manifest.prices.output),
            },
            evidence: EvidenceObject::of(model.qualified.evidence()),
            capabilities: {
                let held = Capability::ALL.into_iter().filter(|one| one.holds(model, plan));
                held.map(Capability::name).collect()
            },
            attribution: if manifest.is_published() {
                Attribution::Published
            } else {
                Attribution::ClaimedByFile
            },
        }
    }
}

impl From<TokenLimits> for ModelLimits {
    fn from(limits: TokenLimits) -> Self {
        Self {
            model_context_tokens: limits.model_context,
            qualified_context_tokens: limits.qualified_context,
            plan_context_tokens: limits.plan_context,
            context_tokens: limits.context,
            max_output_tokens: limits.max_output,
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct ModelPage {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    data: Vec<ModelObject>,
    has_more: bool,
    next_after: Option<ModelId>,
}

impl ModelPage {
    /// The part of `models`, which are sorted by id, that was asked for.
    pub fn cut(models: Vec<ModelObject>, page: Page) -> Self {
        let mut data: Vec<ModelObject> =
            models.into_iter().filter(|m| page.after.is_none_or(|after| m.id.0 > after)).collect();
        let has_more = data.len() > page.limit;
        data.truncate(page.limit);
        let next_after = data.last().map(|model| model.id).filter(|_| has_more);
        Self { object: "list", data, has_more, next_after }
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
