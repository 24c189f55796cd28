//! Requests and when they come: a few shapes that traffic has, over one origin or many.
//!
//! Each generator has a seed, and gives the same arrivals for it each time. The mean gap of a shape is that of all
//! origins together.

use std::f64::consts::TAU;
use std::time::Duration;

/// How requests follow one another.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shape {
    /// As from a clock that is off by a fiftieth: a poller, a health check.
    Regular { gap: Duration },
    /// Independent of one another.
    Poisson { gap: Duration },
    /// So many at once, then a pause.
    Bursts { size: u32, pause: Duration },
    /// Poisson while on. Both kinds of periods are exponential.
    OnOff {
        gap: Duration,
        on: Duration,
        off: Duration,
    },
    /// Poisson, with a rate that goes from a twentieth of its mean at night to nearly twice as much by day.
    Day { gap: Duration },
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) at: Duration,
    pub(crate) origin: u32,
    /// Nothing makes it safe to send twice.
    pub(crate) is_unkeyed: bool,
}

/// The arrivals of one run.
#[derive(Debug)]
pub(crate) struct Traffic {
    shape: Shape,
    rng: fastrand::Rng,
    at: Duration,
    /// Of the burst that has begun.
    left_of_burst: u32,
    on_until: Duration,
    /// The part of all requests that goes to this origin or to one before it.
    origins: Vec<f64>,
    unkeyed: f64,
    left: u64,
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// By how much the rate of a day goes up and down around its mean.
const SWING: f64 = 0.95;

impl Traffic {
    /// So many requests to one origin.
    pub(crate) fn new(shape: Shape, requests: u64, unkeyed: f64, seed: u64) -> Self {
        Traffic {
            shape,
            rng: fastrand::Rng::with_seed(seed),
            at: Duration::ZERO,
            left_of_burst: 0,
            on_until: Duration::ZERO,
            origins: vec![1.0],
            unkeyed,
            left: requests,
        }
    }

    /// The same over so many origins: the second gets half as many as the first, the third a third of them, and so on.
    pub(crate) fn over(mut self, origins: u32) -> Self {
        let mut sum = 0.0;
        self.origins = (1..=origins)
            .map(|rank| {
                sum += 1.0 / f64::from(rank);
                sum
            })
            .collect();
        self.origins.iter_mut().for_each(|part| *part /= sum);
        self
    }

    fn advance(&mut self) {
        match self.shape {
            Shape::Regular { gap } => {
                self.at += gap.mul_f64(0.98 + 0.04 * self.rng.f64());
            }
            Shape::Poisson { gap } => self.at += exponential(&mut self.rng, gap),
            Shape::Bursts { size, pause } => {
                if self.left_of_burst == 0 {
                    self.left_of_burst = size;
                    self.at += exponential(&mut self.rng, pause);
                }
                self.left_of_burst -= 1;
            }
            Shape::OnOff { gap, on, off } => {
                self.at += exponential(&mut self.rng, gap);
                while self.at > self.on_until {
                    self.at = self.on_until + exponential(&mut self.rng, off);
                    self.on_until = self.at + exponential(&mut self.rng, on);
                }
            }
            Shape::Day { gap } => loop {
                let most = 1.0 + SWING;
                self.at += exponential(&mut self.rng, gap.div_f64(most));
                let time_of_day = self.at.as_secs_f64() / DAY.as_secs_f64();
                let rate = 1.0 + SWING * (TAU * time_of_day).sin();
                if self.rng.f64() * most < rate {
                    break;
                }
            },
        }
    }
}

impl Iterator for Traffic {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        self.left = self.left.checked_sub(1)?;
        self.advance();
        let draw = self.rng.f64();
        let origin = self.origins.partition_point(|&part| part < draw);
        let origin = origin.min(self.origins.len() - 1);
        Some(Arrival {
            at: self.at,
            origin: u32::try_from(origin).unwrap_or_default(),
            is_unkeyed: self.rng.f64() < self.unkeyed,
        })
    }
}

/// How long a server works at a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Service {
    Fixed(Duration),
    /// With this median. One in forty takes more than two and a half times as long.
    LogNormal(Duration),
}

impl Service {
    pub(crate) fn draw(self, rng: &mut fastrand::Rng) -> Duration {
        match self {
            Service::Fixed(time) => time,
            Service::LogNormal(median) => {
                // Box and Muller's way to a normal deviate.
                let radius = (-2.0 * (1.0 - rng.f64()).ln()).sqrt();
                let normal = radius * (TAU * rng.f64()).cos();
                median.mul_f64((0.5 * normal).exp())
            }
        }
    }
}

/// An exponential deviate with this mean.
fn exponential(rng: &mut fastrand::Rng, mean: Duration) -> Duration {
    mean.mul_f64(-(1.0 - rng.f64()).ln())
}
