//! The objects that clients read: the account, its balances, models, requests. Times are Unix
//! seconds, amounts integer strings.

use super::query::Page;
use super::schemas::UpstreamSchema;
use cresset_base::{AccountId, ApplicationId, CredentialId, ModelId, UnixMillis};
use cresset_catalogue::{Evidence, FileFacts, Upstream};
use cresset_ledger::{Account, AccountStatus, Credential, CredentialKind, Microcredits};
use cresset_pool::ServedModel;
use cresset_request::{Capability, Plan, TokenLimits};
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
    files: ModelFiles,
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

/// What its files say of the model; null where this node cannot tell.
#[derive(Clone, Debug, Serialize, JsonSchema)]
struct ModelFiles {
    #[schemars(extend("enum" = ["gguf", "safetensors"]))]
    format: &'static str,
    /// Size of all files.
    bytes: u64,
    /// As the files name it, such as `llama`.
    architecture: Option<String>,
    parameters: Option<u64>,
    /// The type that most parameters have, such as `Q4_K`.
    quantisation: Option<String>,
}

impl ModelFiles {
    fn of(facts: &FileFacts) -> Self {
        let FileFacts { format, bytes, architecture, parameters, quantisation } = facts.clone();
        Self { format, bytes, architecture, parameters, quantisation }
    }
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
    /// How the proof of `qualified_context_tokens` stands: `complete` is as much as runs here,
    /// `rising` is proven further while the model is served, `stopped` failed beyond it, and
    /// `partial` waits for a qualification.
    #[schemars(extend("enum" = ["complete", "rising", "stopped", "partial"]))]
    context: &'static str,
    /// The node's public key: hex SHA-256 of its bytes.
    key: String,
}

impl EvidenceObject {
    fn of(model: &ServedModel) -> Self {
        let (evidence, context) = (model.qualified.evidence().clone(), model.context_state());
        let Evidence { grade, like, record, suite, qualified_at, key, .. } = evidence;
        Self { grade: grade.name(), like, record, suite, qualified_at, context, key }
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
            files: ModelFiles::of(model.qualified.facts()),
            pricing: Pricing {
                input: units(manifest.prices.input),
                cached_input: units(manifest.prices.cached_input),
                output: units(manifest.prices.output),
            },
            evidence: EvidenceObject::of(model),
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
