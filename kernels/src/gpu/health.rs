//! What a GPU tells of its own condition. A value that its driver does not tell is absent.

use std::fmt::{self, Debug, Formatter};

/// The condition of a GPU at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuHealth {
    pub celsius: Option<u32>,
    pub watts: Option<f64>,
    /// The clock of the multiprocessors, MHz.
    pub sm_mhz: Option<u32>,
    pub memory_mhz: Option<u32>,
    /// Why clocks are lower than they could be; empty where nothing slows the GPU.
    pub slowdowns: Option<Vec<Slowdown>>,
    /// Errors of its memory since the driver was loaded, that it corrected and that it could not.
    pub corrected_errors: Option<u64>,
    pub uncorrected_errors: Option<u64>,
    pub remapped: Option<RemappedRows>,
    /// The last error that the driver reported since somebody looks, by NVIDIA's number; 0 if none.
    pub last_xid: Option<u64>,
}

/// Rows of a GPU's memory that others have replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemappedRows {
    /// Because of errors that were corrected, and of those that were not.
    pub corrected: u32,
    pub uncorrected: u32,
    /// A row waits to be replaced at the next reset of the GPU.
    pub is_pending: bool,
    /// A row could not be replaced.
    pub has_failed: bool,
}

/// A reason for which a GPU lowers its clocks. Idling and clocks that somebody has set are none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slowdown {
    PowerCap,
    Hardware,
    SyncBoost,
    Heat,
    HardwareHeat,
    PowerBrake,
}

impl Slowdown {
    /// Each with its bit in the driver's answer.
    pub const ALL: [(Self, u64); 6] = [
        (Self::PowerCap, 0x4),
        (Self::Hardware, 0x8),
        (Self::SyncBoost, 0x10),
        (Self::Heat, 0x20),
        (Self::HardwareHeat, 0x40),
        (Self::PowerBrake, 0x80),
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::PowerCap => "power_cap",
            Self::Hardware => "hardware",
            Self::SyncBoost => "sync_boost",
            Self::Heat => "heat",
            Self::HardwareHeat => "hardware_heat",
            Self::PowerBrake => "power_brake",
        }
    }
}

impl GpuHealth {
    /// What an operator should look at, as a sentence each.
    pub fn concerns(&self) -> Vec<&'static str> {
        let hot = |slowdown: &Slowdown| matches!(slowdown, Slowdown::Heat | Slowdown::HardwareHeat);
        let remapped = self.remapped.unwrap_or_default();
        let all = [
            (self.slowdowns.iter().flatten().any(hot), "it is slowed down by heat"),
            (self.uncorrected_errors > Some(0), "its memory had errors that it could not correct"),
            (remapped.is_pending, "a row of its memory waits to be replaced"),
            (remapped.has_failed, "a row of its memory could not be replaced"),
            (self.last_xid > Some(0), "its driver reported an error"),
        ];
        all.into_iter().filter_map(|(is_so, text)| is_so.then_some(text)).collect()
    }
}

impl GpuHealth {
    /// What a measured time depends on, as in `1980 MHz, nothing slows it`; empty if not known.
    pub fn clocks(&self) -> String {
        let slowed = |slowdowns: &Vec<Slowdown>| {
            let names: Vec<_> = slowdowns.iter().map(|slowdown| slowdown.name()).collect();
            let by = format!("slowed by {}", names.join(" and "));
            if names.is_empty() { "nothing slows it".to_owned() } else { by }
        };
        let clock = self.sm_mhz.map(|value| format!("{value} MHz"));
        joined([clock, self.slowdowns.as_ref().map(slowed)])
    }
}

fn joined(parts: impl IntoIterator<Item = Option<String>>) -> String {
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

impl fmt::Display for GpuHealth {
    /// The values that are known, as in `41 °C, 312 W, 1980 MHz, nothing slows it`.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let known = joined([
            self.celsius.map(|value| format!("{value} °C")),
            self.watts.map(|value| format!("{value:.0} W")),
            Some(self.clocks()).filter(|clocks| !clocks.is_empty()),
            self.uncorrected_errors.filter(|n| *n > 0).map(|n| format!("uncorrected errors: {n}")),
            self.last_xid.filter(|xid| *xid > 0).map(|xid| format!("Xid {xid}")),
        ]);
        f.write_str(if known.is_empty() { "it tells nothing" } else { &known })
    }
}

/// Reads the condition of one GPU.
pub struct GpuSensor(Box<dyn Fn() -> GpuHealth + Send + Sync>);

impl GpuSensor {
    pub fn new(read: impl Fn() -> GpuHealth + Send + Sync + 'static) -> Self {
        Self(Box::new(read))
    }

    /// Takes some microseconds, and no time of the GPU.
    pub fn read(&self) -> GpuHealth {
        (self.0)()
    }
}

impl Debug for GpuSensor {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("GpuSensor")
    }
}
