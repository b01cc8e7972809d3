//! Configuration: one TOML file, overridden by `CRESSET_…` variables, overridden by flags. Every
//! limit is here, with its unit. This is the only module that reads environment variables.
//!
//! A new setting is a field with its bounds and default in the section of the crate that uses it,
//! or in the list of those that models use (`cresset_models::model_settings`).

mod bounds;
mod layers;
mod paths;
mod sections;

pub use layers::{
    ConfigFile, ConfigSource, LoadedConfig, Override, SettingChange, SettingRow, ValueOrigin,
    changes,
};
pub use paths::{
    cache_dir, client_key, colours_allowed, default_config_file, default_data_dir, key_in,
    operator_token,
};
pub use sections::{
    GatewaySettings, GradeSetting, ListenSettings, LogFormat, LogSettings, QualificationSettings,
    QuickstartSettings,
};

use cresset_api::{ApiSettings, ChatLeeway, CredentialSettings, GatewayHint};
use cresset_transport::HttpSettings;

use cresset_base::section;
use cresset_catalogue::HubSettings;
use cresset_commands::OperatorSettings;
use cresset_engine::EngineSettings;
use cresset_request::Plan;
use cresset_store::{ClockSettings, LedgerSettings, RequestSettings};
use cresset_telemetry::traces::TraceSettings;
use cresset_text::{FormatSettings, TemplateSettings};
use cresset_tls::{ClusterSettings, TlsSettings};
use std::collections::BTreeMap;

section! {
/// All settings. Unknown keys are errors.
pub struct Config {
    /// Name of the service: clients may send the session header as X-NAME-Session-Id. Letters,
    /// digits and dashes.
    pub service_name: String = "Cresset".into(),
    pub listen: ListenSettings = ListenSettings::default(),
    pub tls: TlsSettings = TlsSettings::default(),
    pub engine: EngineSettings = EngineSettings::default(),
    pub http: HttpSettings = HttpSettings::default(),
    pub gateway: GatewaySettings = GatewaySettings::default(),
    pub requests: RequestSettings = RequestSettings::default(),
    pub ledger: LedgerSettings = LedgerSettings::default(),
    pub cluster: ClusterSettings = ClusterSettings::default(),
    pub clock: ClockSettings = ClockSettings::default(),
    pub template: TemplateSettings = TemplateSettings::default(),
    pub formats: FormatSettings = FormatSettings::default(),
    pub credentials: CredentialSettings = CredentialSettings::default(),
    pub hub: HubSettings = HubSettings::default(),
    pub qualification: QualificationSettings = QualificationSettings::default(),
    pub quickstart: QuickstartSettings = QuickstartSettings::default(),
    pub log: LogSettings = LogSettings::default(),
    pub traces: TraceSettings = TraceSettings::default(),
    /// Limits of accounts, by plan name. Each account names one; `default` must exist.
    pub plans: BTreeMap<String, Plan> = BTreeMap::from([("default".into(), Plan::default())]),
}
}

/// Why a configuration was refused: names the file, variable or flag, the key, and the line where
/// there is one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

impl Config {
    /// The JSON Schema of the file.
    pub fn schema() -> serde_json::Value {
        schemars::schema_for!(Config).to_value()
    }

    /// The settings of the public surface.
    pub fn api(&self) -> ApiSettings {
        ApiSettings {
            disconnect_grace_seconds: self.requests.disconnect_grace_seconds,
            service_name: self.service_name.clone(),
            http: self.http.clone(),
            credentials: self.credentials.clone(),
            public: self.listen.public,
            leeway: ChatLeeway::default(),
            gateway: GatewayHint::default(),
        }
    }

    /// The settings of the public surface for what the node's own gateway asks.
    pub fn gateway_api(&self) -> ApiSettings {
        let GatewaySettings { max_messages, max_tools, max_files, max_token_ids, .. } =
            self.gateway;
        let max_body_bytes = self.gateway.max_body_mib << 20;
        let text = self.gateway.max_description_kib << 10;
        let bounds = [
            ("messages", max_messages),
            ("tools", max_tools),
            ("description", text),
            ("schema", text),
            ("arguments", max_body_bytes),
            ("files", max_files),
            ("token_ids", max_token_ids),
        ];
        ApiSettings {
            http: HttpSettings { max_body_bytes, ..self.http.clone() },
            leeway: ChatLeeway { bounds: bounds.into(), is_lenient: true },
            ..self.api()
        }
    }

    /// What operators' commands take from the settings.
    pub fn operator(&self) -> OperatorSettings {
        OperatorSettings {
            plans: self.plans.clone(),
            prefix: self.credentials.prefix.clone(),
            requests: self.requests.clone(),
            folders: self.listen.operator_folders.clone(),
        }
    }

    /// Compute threads, with 0 resolved to the number of cores.
    pub fn threads(&self) -> usize {
        match self.engine.threads {
            0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            n => n,
        }
    }

    /// Memory for all loaded models, bytes, with 0 resolved.
    pub fn model_bytes(&self) -> u64 {
        match self.engine.memory_mib as u64 {
            0 => cresset_base::memory::usable_bytes().map_or(u64::MAX, |bytes| bytes / 4 * 3),
            mib => mib << 20,
        }
    }
}
