//! Which values are in bounds.

use super::{Config, ConfigError};

impl Config {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let e = &self.engine;
        let h = &self.http;
        let r = &self.requests;
        require_name("service_name", &self.service_name, "letters, digits and dashes", |c| {
            c.is_ascii_alphanumeric() || c == '-'
        })?;
        require_name(
            "credentials.prefix",
            &self.credentials.prefix,
            "lower-case letters and digits",
            |c| c.is_ascii_lowercase() || c.is_ascii_digit(),
        )?;
        if !self.listen.operator.ip().to_canonical().is_loopback()
            && !self.listen.operator_beyond_loopback
        {
            return Err(ConfigError(format!(
                "listen.operator = {}: other machines could reach this listener, which asks for no credential; use 127.0.0.1, or set listen.operator_beyond_loopback = true",
                self.listen.operator
            )));
        }
        if self.listen.public == self.listen.operator && self.listen.public.port() != 0 {
            return Err(ConfigError(format!(
                "listen.public = listen.operator = {}: give each a port of its own",
                self.listen.public
            )));
        }
        let address = |text: &&String| text.starts_with("https://") || text.starts_with("http://");
        if let Some(endpoint) = self.hub.endpoint.as_ref().filter(|text| !address(text)) {
            return Err(ConfigError(format!(
                "hub.endpoint = {endpoint:?}: must begin with https:// or http://"
            )));
        }
        require_range("engine.threads", e.threads as u64, 0, 1024)?;
        require_range("engine.kv_mib", e.kv_mib as u64, 1, 1 << 24)?;
        if !(0.05..=1.0).contains(&e.gpu_memory_share) {
            return Err(ConfigError(format!(
                "engine.gpu_memory_share = {}: must be 0.05 to 1",
                e.gpu_memory_share
            )));
        }
        require_range("engine.gpu_graph_rows", e.gpu_graph_rows as u64, 0, 1_024)?;
        require_range("engine.memory_mib", e.memory_mib as u64, 0, 1 << 24)?;
        require_range("engine.model_wait_seconds", e.model_wait_seconds, 1, 3_600)?;
        if ![16, 32, 64].contains(&e.block_size) {
            return Err(ConfigError(format!(
                "engine.block_size = {}: must be 16, 32 or 64",
                e.block_size
            )));
        }
        require_range("engine.max_batched_tokens", e.max_batched_tokens as u64, 16, 65_536)?;
        require_range("engine.max_rows", e.max_rows as u64, 1, e.max_batched_tokens as u64)?;
        require_range("engine.max_waiting", e.max_waiting as u64, 1, 1 << 20)?;
        require_range("engine.max_context", e.max_context as u64, 0, 1 << 24)?;
        require_range("http.first_byte_seconds", h.first_byte_seconds, 1, 3_600)?;
        require_range("http.header_seconds", h.header_seconds, 1, 3_600)?;
        require_range("http.body_seconds", h.body_seconds, 1, 3_600)?;
        require_range("http.write_stall_seconds", h.write_stall_seconds, 1, 3_600)?;
        require_range("http.idle_seconds", h.idle_seconds, 1, 86_400)?;
        require_range("http.linger_seconds", h.linger_seconds, 0, 60)?;
        require_range("http.keep_alive_seconds", h.keep_alive_seconds, 1, 3_600)?;
        require_range("http.max_headers", h.max_headers as u64, 8, 1_024)?;
        require_range("http.max_header_bytes", h.max_header_bytes as u64, 8_192, 1 << 20)?;
        require_range("http.max_body_bytes", h.max_body_bytes as u64, 1_024, 64 << 20)?;
        require_range("http.max_connections", h.max_connections as u64, 1, 1 << 20)?;
        require_range("http.max_connections_per_ip", h.max_connections_per_ip as u64, 1, 1 << 20)?;
        require_range("http.max_http2_streams", u64::from(h.max_http2_streams), 1, 65_536)?;
        require_range("http.max_http2_resets", h.max_http2_resets as u64, 1, 65_536)?;
        require_range("http.http2_ping_seconds", h.http2_ping_seconds, 1, 3_600)?;
        require_range(
            "http.failed_auth_per_minute",
            u64::from(h.failed_auth_per_minute),
            1,
            1 << 20,
        )?;
        require_range("requests.disconnect_grace_seconds", r.disconnect_grace_seconds, 0, 3_600)?;
        require_range("requests.deadline_seconds", r.deadline_seconds, 1, 86_400)?;
        require_range("requests.cancel_wait_milliseconds", r.cancel_wait_milliseconds, 0, 60_000)?;
        require_range("requests.max_subscribers", r.max_subscribers as u64, 1, 1_024)?;
        require_range("requests.body_retention_hours", r.body_retention_hours, 1, 24 * 365)?;
        require_range("requests.tombstone_days", r.tombstone_days, 1, 3_650)?;
        require_range("requests.drain_grace_seconds", r.drain_grace_seconds, 0, 86_400)?;
        require_range("requests.min_free_mib", r.min_free_mib, 128, 1 << 24)?;
        require_range("qualification.max_age_days", self.qualification.max_age_days, 1, 3_650)?;
        let quick = self.qualification.quick_context_tokens;
        require_range("qualification.quick_context_tokens", quick.into(), 1, 1 << 24)?;
        self.validate_plans()
    }

    fn validate_plans(&self) -> Result<(), ConfigError> {
        if !self.plans.contains_key("default") {
            return Err(ConfigError("plans: a plan named `default` is required".into()));
        }
        for (name, plan) in &self.plans {
            let rate = u64::from(plan.requests_per_minute);
            require_range(&format!("plans.{name}.requests_per_minute"), rate, 1, 1 << 24)?;
            require_range(&format!("plans.{name}.burst"), u64::from(plan.burst), 1, 1 << 24)?;
            require_range(
                &format!("plans.{name}.max_concurrent"),
                u64::from(plan.max_concurrent),
                1,
                1 << 20,
            )?;
            require_range(&format!("plans.{name}.priority"), plan.priority.into(), 0, 9)?;
        }
        Ok(())
    }
}

fn require_range(key: &str, value: u64, low: u64, high: u64) -> Result<(), ConfigError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(ConfigError(format!("{key} = {value}: must be {low} to {high}")))
}

fn require_name(
    key: &str,
    value: &str,
    what: &str,
    allowed: impl Fn(char) -> bool,
) -> Result<(), ConfigError> {
    if (1..=32).contains(&value.len()) && value.chars().all(allowed) {
        return Ok(());
    }
    Err(ConfigError(format!("{key} = {value:?}: must be 1 to 32 {what}")))
}
